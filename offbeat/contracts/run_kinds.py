"""The kinds of run, what a supervised run has of its own, and what only one of them knows."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from offbeat.contracts.base import Contract

RunKind = Literal["grpo", "sft"]


class SftSection(Contract):
    """What a supervised run trains on. Names follow TRL's `SFTConfig` where it has one."""

    batch_size: Annotated[int, Field(ge=1, le=4096)] = 32
    """Examples in one optimizer step."""
    completion_field: Annotated[str, Field(min_length=1, max_length=128)] = "completion"
    """The column with the answer to the prompt, in the prompt/completion format."""
    completion_only_loss: bool = True
    """Train on what the assistant says alone; else on the prompt and the other turns too."""
    max_length: Annotated[int, Field(ge=2, le=1_048_576)] | None = None
    """Tokens after which an example is cut off; none refuses what the model has no room for."""


OWN_PARTS: Mapping[RunKind, tuple[str, ...]] = {
    "grpo": (
        "rollout",
        "staleness",
        "eval.temperature",
        "eval.samples_per_prompt",
        "train.loss",
        "train.advantage",
        "train.epsilon_low",
        "train.epsilon_high",
        "train.beta",
        "train.correction",
        "train.correction_cap",
        "train.off_policy_mask",
        "train.overlong_cache",
    ),
    "sft": ("sft",),
}
"""Sections and fields that mean nothing to the other kind."""


def rewards_complaint(kind: RunKind | None, has_rewards: bool) -> str | None:
    """What is wrong with there being rewards, or none."""
    if kind == "grpo" and not has_rewards:
        return "a GRPO run needs at least one"
    if kind == "sft" and has_rewards:
        return 'belongs to kind = "grpo": leave it out'
    return None


def kind_complaint(kind: RunKind, spec: Contract) -> str | None:
    """What of the spec does not fit its kind, and what to do about it."""
    for other, parts in OWN_PARTS.items():
        for part in parts if other != kind else ():
            name, _, field = part.partition(".")
            section: Contract = getattr(spec, name)
            default = type(section)() if not field else type(section).model_fields[field].default
            if (getattr(section, field) if field else section) != default:
                return f'{part} belongs to kind = "{other}": leave it out'
    return None


def full_complaint(quantization: str, checkpoint_every: int, *, is_full: bool) -> str | None:
    """What does not go with training all weights, or with an adapter alone."""
    if is_full and quantization != "none":
        return (
            f'model.quantization = "{quantization}": full fine-tuning cannot train weights of 4 '
            "bits: add a [lora] section, or leave it out"
        )
    if not is_full and checkpoint_every > 1:
        return (
            "train.checkpoint_every belongs to full fine-tuning: every version of an adapter is "
            "a checkpoint; leave it out"
        )
    return None
