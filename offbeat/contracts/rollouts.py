"""What a generator writes: one row a sample, and what the orchestrator keeps of it.

Token ids and log-probabilities are the engine's own; text is beside them for people and is never
tokenised again. Rewards travel, advantages do not: a new estimator needs no new generation.
"""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbeat.contracts.base import Contract
from offbeat.contracts.bounds import Count, Name, Version
from offbeat.contracts.weights import Sha256


class Rollout(Contract):
    """One sample of one prompt, as a row of `rollouts/*.parquet`."""

    run_id: str
    job_id: str
    group_id: str
    prompt_id: str
    sample: Annotated[int, Field(ge=0)]
    """Index within the group."""
    policy_version: Annotated[int, Field(ge=0)]
    adapter_sha256: Sha256
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probabilities, log mu: of the distribution that was sampled from."""
    finish_reason: Literal["stop", "length"]
    prompt: str
    completion: str
    reward: float | None
    """The weighted sum of the parts; none where no part could score the sample."""
    rewards: dict[str, float | None]
    generator_id: str
    engine: str
    sampled_at: datetime

    @model_validator(mode="after")
    def _one_logprob_a_token(self) -> Self:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.completion_ids)} completion ids but {len(self.logprobs)} logprobs"
            )
        return self


class GroupSummary(Contract):
    """What the control plane knows of a finished group."""

    group_id: Name
    policy_version: Version
    """The oldest version that produced any token of the group."""
    adapter_sha256: Sha256
    num_samples: Count
    num_tokens: Count
    reward_mean: float | None
    """Over the samples that could be scored; none where there were none."""
    reward_std: float | None
    """Population standard deviation over the same samples."""
