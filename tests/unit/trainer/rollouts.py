"""Samples with two prompt tokens, for tests of the trainer's pure parts."""

from datetime import UTC, datetime
from typing import Literal

from offbeat.contracts.rollouts import Rollout


def rollout(
    sample: int,
    *,
    reward: float | None,
    version: int,
    ids: tuple[int, ...],
    finish_reason: Literal["stop", "length"] = "stop",
    adapter_sha256: str = "a" * 64,
) -> Rollout:
    """One sample of one group."""
    return Rollout(
        run_id="run",
        job_id="job",
        group_id="group",
        prompt_id="train-0",
        sample=sample,
        policy_version=version,
        adapter_sha256=adapter_sha256,
        prompt_ids=(5, 6),
        completion_ids=ids,
        logprobs=(-1.0,) * len(ids),
        finish_reason=finish_reason,
        prompt="x",
        completion="y",
        reward=reward,
        rewards={"exact_match": reward},
        generator_id="test",
        engine="test",
        sampled_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
