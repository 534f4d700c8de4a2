"""The reward of a sample from the scores of its parts, as TRL sums them.

A part that could not score a sample is left out of its sum. A sample that no part could score has
no reward: it must never count as 0.
"""

import math
from collections.abc import Sequence

from offbeat.contracts.run_spec import RewardSection
from offbeat.rewards.scores import PartScores, SampleScore


def combine(
    parts: Sequence[RewardSection], scored: Sequence[PartScores]
) -> tuple[SampleScore, ...]:
    """One `SampleScore` a sample; `scored` has one entry a part."""
    labels = [part.label for part in parts]
    weights = [part.weight for part in parts]
    return tuple(
        SampleScore(
            reward=weighted_sum(weights, values), rewards=dict(zip(labels, values, strict=True))
        )
        for values in zip(*(part.values for part in scored), strict=True)
    )


def weighted_sum(weights: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Sum of weight x value over the values that are there; None where none is, or on overflow."""
    terms = [
        weight * value for weight, value in zip(weights, values, strict=True) if value is not None
    ]
    total = sum(terms) if terms else math.nan
    return total if math.isfinite(total) else None
