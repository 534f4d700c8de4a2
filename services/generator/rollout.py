"""What a generator does with a job: sample groups of completions, score them, write them down.

    prompts + newest policy -> engine -> rewards -> rollouts/*.parquet -> summaries

Everything a trainer needs is in the rows: token ids and log-probabilities as the engine gave them,
and the version that gave them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from transformers import PreTrainedTokenizerBase

from offbeat import keys
from offbeat.contracts.jobs import GenerateInput, GenerateOutput, Lease
from offbeat.contracts.rollouts import GroupSummary, Rollout
from offbeat.contracts.run_spec import RolloutSection
from offbeat.objects import ObjectStore
from offbeat.rewards.scorer import RewardScorer
from offbeat.rewards.scores import RewardFailure, RewardSample
from offbeat.tables import PromptRow, encode_rollouts
from offbeat.worker import JobContext
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.events import Events
from services.generator.models import BaseModel, BaseModels
from services.generator.shelf import Policy

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """The parts of a generator process."""

    store: ObjectStore
    prompts: Callable[[str], Sequence[PromptRow]]
    """The prompt table under a key."""
    models: BaseModels
    scorer: RewardScorer
    events: Events
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


def generate(context: JobContext, generator: Generator) -> GenerateOutput:
    """Sample the groups of the job with the newest version at hand."""
    lease, spec = context.lease, context.lease.spec
    job = lease.input
    assert isinstance(job, GenerateInput)
    groups = requested_groups(job, generator.prompts(job.prompts_key), spec.rollout.group_size)
    sampling = sampling_of(spec.rollout, spec.rollout.temperature)

    with (
        generator.models.use(spec.model) as model,
        model.policies(lease.run_id).newest(job.min_version, check=context.check) as policy,
    ):
        sampled = sample(model, policy, groups, sampling, context.check)
    rollouts, failures = scored_rollouts(lease, generator, sampled)
    report_failures(lease, generator.events, failures)

    context.check()
    key = keys.rollouts(lease.run_id, lease.job_id, lease.attempt)
    generator.store.put(key, encode_rollouts(rollouts, [part.label for part in spec.rewards]))
    summaries = tuple(
        summary([row for row in rollouts if row.group_id == group.group_id]) for group in groups
    )
    num_tokens = sum(group.num_tokens for group in summaries)
    engine_s = round(sampled.seconds, 3)
    log.info("Generated.", version=policy.version, tokens=num_tokens, engine_s=engine_s)
    return GenerateOutput(
        rollouts_key=key,
        groups=summaries,
        generated_tokens=num_tokens,
        generate_s=sampled.seconds,
    )


def requested_groups(
    job: GenerateInput, prompts: Sequence[PromptRow], group_size: int
) -> list[Group]:
    """The groups of a job with their prompts; sample k draws from the stream `seed + k`."""
    return [
        Group(
            group_id=group.group_id,
            prompt=prompts[group.prompt_row],
            seeds=tuple(range(group.seed, group.seed + group_size)),
        )
        for group in job.groups
    ]


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


def scored_rollouts(
    lease: Lease, generator: Generator, sampled: Sampled
) -> tuple[list[Rollout], tuple[RewardFailure, ...]]:
    """One row a sample, and what went wrong in scoring them."""
    sampled_at = datetime.now(UTC)
    samples = [
        (group, number, completion, text_of(sampled.tokenizer, completion))
        for group, completions in zip(sampled.groups, sampled.completions, strict=True)
        for number, completion in enumerate(completions)
    ]
    scored = generator.scorer.score(
        lease.spec.rewards,
        [
            RewardSample(
                completion=text, completion_ids=completion.ids, columns=group.prompt.columns
            )
            for group, _, completion, text in samples
        ],
    )
    rollouts = [
        Rollout(
            run_id=lease.run_id,
            job_id=lease.job_id,
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            sample=number,
            policy_version=sampled.policy.version,
            adapter_sha256=sampled.policy.adapter_sha256,
            prompt_ids=group.prompt.prompt_ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            prompt=group.prompt.prompt,
            completion=text,
            reward=score.reward,
            rewards=dict(score.rewards),
            generator_id=generator.worker_id,
            engine=sampled.engine,
            sampled_at=sampled_at,
        )
        for (group, number, completion, text), score in zip(samples, scored.scores, strict=True)
    ]
    return rollouts, scored.failures


def text_of(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The completion for people and for rewards, without the tokens that are no text."""
    text = tokenizer.decode(list(completion.ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def report_failures(lease: Lease, events: Events, failures: Iterable[RewardFailure]) -> None:
    """One event for each part that could not score some samples of the job."""
    for part, message in {failure.part: failure.message for failure in failures}.items():
        events.post(
            lease.run_id,
            "reward_failed",
            f"Reward {part!r} could not score some samples: {message}",
            {"part": part, "job_id": lease.job_id},
        )


def summary(rows: Sequence[Rollout]) -> GroupSummary:
    """What the control plane keeps of a group, from its rows."""
    rewards = [row.reward for row in rows if row.reward is not None]
    return GroupSummary(
        group_id=rows[0].group_id,
        policy_version=rows[0].policy_version,
        adapter_sha256=rows[0].adapter_sha256,
        num_samples=len(rows),
        num_tokens=sum(len(row.completion_ids) for row in rows),
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
    )
