"""What a run asks for, as far as a plan depends on it: the spec with the request's options."""

from dataclasses import dataclass
from typing import Literal

from offbeat.contracts.plan import Method, PlanOptions
from offbeat.contracts.run_spec import LoraSection, RunSpec
from offbeat.errors import InvalidRequestError
from offbeat.plan.architecture import Architecture
from offbeat.plan.parameters import lora_targets
from offbeat.plan.setup import Setup

EXAMPLE_TOKENS = 2048
"""Of a supervised example, where the spec does not say after how many it is cut off."""
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """None where the plan may choose."""

    kind: Literal["grpo", "sft"]
    method: Method
    rank: int
    targets: frozenset[str]
    has_dropout: bool
    dtype_bytes: int
    sequence_tokens: int
    """Of the longest sequence, which is never split."""
    step_tokens: int
    """Of an optimizer step, on all ranks, with sequences of full length."""
    token_budget: int | None
    is_checkpointed: bool | None
    is_offloaded: bool | None

    def setup(
        self, *, token_budget: int, is_checkpointed: bool, is_offloaded: bool, num_shards: int
    ) -> Setup:
        """With what was open decided."""
        return Setup(
            method=self.method,
            token_budget=token_budget,
            is_checkpointed=is_checkpointed,
            num_shards=num_shards,
            is_offloaded=is_offloaded,
            rank=self.rank,
            targets=self.targets if self.method != "full" else frozenset(),
            has_dropout=self.has_dropout and self.method != "full",
            dtype_bytes=self.dtype_bytes,
        )


def wanted_of(spec: RunSpec, options: PlanOptions, model: Architecture) -> Wanted:
    """What the spec and the options ask for. Raises `InvalidRequestError` where these disagree."""
    # The options may ask for an adapter where the spec has none.
    train, lora = spec.train, spec.lora or LoraSection()
    sequence_tokens, step_tokens = _tokens(spec, options)
    budget = options.token_budget
    if budget is None and train.token_budget != "auto":
        budget = train.token_budget
    checkpointing = options.gradient_checkpointing
    if checkpointing is None and train.gradient_checkpointing != "auto":
        checkpointing = train.gradient_checkpointing
    return Wanted(
        kind=spec.kind,
        method=_method(spec, options),
        rank=options.lora_rank or lora.rank,
        targets=lora_targets(model, lora.target_modules),
        has_dropout=lora.dropout > 0,
        dtype_bytes=DTYPE_BYTES[spec.model.dtype],
        sequence_tokens=sequence_tokens,
        step_tokens=step_tokens,
        token_budget=budget,
        is_checkpointed=checkpointing,
        is_offloaded=options.offload,
    )


def _method(spec: RunSpec, options: PlanOptions) -> Method:
    quantization = options.quantization or spec.model.quantization
    asks_for_lora = options.lora_rank is not None or options.quantization is not None
    if options.full or (spec.is_full and not asks_for_lora):
        if quantization == "nf4":
            raise InvalidRequestError(
                "full fine-tuning cannot train weights of 4 bits: leave out full, or nf4"
            )
        return "full"
    return "qlora" if quantization == "nf4" else "lora"


def _tokens(spec: RunSpec, options: PlanOptions) -> tuple[int, int]:
    """Of the longest sequence, and of a step. A prompt is forwarded once for its group."""
    if spec.kind == "sft":
        longest = spec.sft.max_length or EXAMPLE_TOKENS
        return longest, longest * spec.sft.batch_size
    rollout = spec.rollout
    completions = rollout.samples_per_step * rollout.max_new_tokens
    prompts = rollout.groups_per_step * options.prompt_tokens
    return options.prompt_tokens + rollout.max_new_tokens, completions + prompts
