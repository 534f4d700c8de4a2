"""From completions to rows: text, rewards, and what the control plane keeps of each group."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import structlog
from transformers import PreTrainedTokenizerBase

from offbeat.contracts.leases import EVENT_CHARS_MAX, Lease, WorkerEvent
from offbeat.contracts.rollouts import GroupSummary, Rollout
from offbeat.rewards.scores import RewardFailure, RewardSample
from services.generator.engines.base import Completion
from services.generator.sample import Generator, Sampled

log = structlog.get_logger(__name__)


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


def report_failures(
    lease: Lease, tell: Callable[[WorkerEvent], None], failures: Iterable[RewardFailure]
) -> None:
    """One event for each part that could not score some samples of the job."""
    for part, message in {failure.part: failure.message for failure in failures}.items():
        log.warning("A reward could not score some samples.", part=part, reason=message)
        text = f"Reward {part!r} could not score some samples: {message}"
        tell(
            WorkerEvent(
                run_id=lease.run_id,
                kind="reward_failed",
                message=text[:EVENT_CHARS_MAX],
                data={"part": part, "job_id": lease.job_id},
            )
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
