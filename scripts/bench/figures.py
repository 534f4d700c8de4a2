"""Figures from measurements: ratios, rates and the time to a reward. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from scripts.bench.contender import StepMeasurement


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """How two contenders did on one workload; ratios above 1 are in Offbeat's favour, but for
    memory."""

    case: str
    step_ratio: float
    """TRL's median step time over Offbeat's."""
    cpu_ratio: float
    """The same of CPU time: on one thread, what the step ratio is on a quiet machine."""
    tokens_per_s_ratio: float
    peak_memory_ratio: float
    """Offbeat's peak over TRL's."""
    matmul_share: float
    """Of the machine's measured rate of matrix products, what Offbeat's step reaches."""
    offbeat_step_s: float
    trl_step_s: float
    offbeat_tokens_per_s: float
    trl_tokens_per_s: float
    offbeat_peak_bytes: int
    trl_peak_bytes: int


def step_figures(
    case: str,
    offbeat: StepMeasurement,
    trl: StepMeasurement,
    *,
    offbeat_flops: int,
    flops_per_s: float,
) -> StepFigures:
    """The figures of one workload. Tokens are those of completions, which both train on."""
    offbeat_s, trl_s = median(offbeat.seconds), median(trl.seconds)
    rates = offbeat.scored_tokens / offbeat_s, trl.scored_tokens / trl_s
    return StepFigures(
        case=case,
        step_ratio=trl_s / offbeat_s,
        cpu_ratio=median(trl.cpu_seconds) / median(offbeat.cpu_seconds),
        tokens_per_s_ratio=rates[0] / rates[1],
        peak_memory_ratio=offbeat.peak_bytes / trl.peak_bytes,
        matmul_share=offbeat_flops / offbeat_s / flops_per_s,
        offbeat_step_s=offbeat_s,
        trl_step_s=trl_s,
        offbeat_tokens_per_s=rates[0],
        trl_tokens_per_s=rates[1],
        offbeat_peak_bytes=offbeat.peak_bytes,
        trl_peak_bytes=trl.peak_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class RewardPoint:
    """The mean reward of one step's samples, and when the step was done."""

    time_s: float
    reward: float


def time_to_reward(points: Sequence[RewardPoint], goal: float, window: int) -> float | None:
    """When the mean reward of `window` steps in a row first reached the goal; None: never."""
    for end in range(window, len(points) + 1):
        if fmean(point.reward for point in points[end - window : end]) >= goal:
            return points[end - 1].time_s
    return None
