"""What is scored and what comes of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One completion to score."""

    completion: str
    completion_ids: tuple[int, ...]
    columns: Mapping[str, JsonValue]
    """The columns of its row of the prompt table: `prompt` is the prompt as the data has it."""


@dataclass(frozen=True, kw_only=True)
class PartScores:
    """One part's scores of a batch. None: could not be scored; `problem` then says why."""

    values: tuple[float | None, ...]
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class SampleScore:
    """The reward of one sample, and each part's unweighted share by label."""

    reward: float | None
    rewards: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """A part, by its label, that could not score some samples, and why."""

    part: str
    message: str


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """One score a sample, in their order."""

    scores: tuple[SampleScore, ...]
    failures: tuple[RewardFailure, ...]
