"""From prompts to completions: the parts of a generator process, and one call of its engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.run_spec import RolloutSection
from offbeat.objects import ObjectStore
from offbeat.rewards.scorer import RewardScorer
from offbeat.tables import PromptRow
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.models import BaseModel, BaseModels
from services.generator.shelf import Policy


@dataclass(frozen=True, kw_only=True)
class Generator:
    """The parts of a generator process."""

    store: ObjectStore
    prompts: Callable[[str], Sequence[PromptRow]]
    """The prompt table under a key."""
    models: BaseModels
    scorer: RewardScorer
    tell: Callable[[WorkerEvent], None]
    """Has the log of a run hold something."""
    worker_id: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and one seed for each sample of it."""

    group_id: str
    prompt: PromptRow
    seeds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The completions of some groups, and what they were made with."""

    groups: Sequence[Group]
    completions: Sequence[Sequence[Completion]]
    """One sequence a group."""
    policy: Policy
    engine: str
    tokenizer: PreTrainedTokenizerBase
    seconds: float
    """Time in the engine."""


def sampling_of(rollout: RolloutSection, temperature: float) -> Sampling:
    """The run's sampling at this temperature."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop=rollout.stop,
    )


def sample(
    model: BaseModel,
    policy: Policy,
    groups: Sequence[Group],
    sampling: Sampling,
    check: Callable[[], None],
) -> Sampled:
    """Have the engine complete the groups; `check` ends it early by raising."""
    started_at = time.monotonic()
    requests = [
        SampleRequest(prompt_ids=group.prompt.prompt_ids, seeds=group.seeds) for group in groups
    ]
    completions = model.engine.generate(requests, policy.name, sampling, check=check)
    return Sampled(
        groups=groups,
        completions=completions,
        policy=policy,
        engine=model.engine.name,
        tokenizer=model.tokenizer,
        seconds=time.monotonic() - started_at,
    )
