"""What a step reports, under TRL's names. Pure functions; a metric without data is left out.

Means over tokens are over the forwarded ones: rows without an advantage have no forward.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offbeat.algorithms.advantages import without_signal
from offbeat.algorithms.losses import LOSSES, cispo, ppo_clip
from offbeat.algorithms.packing import PackedTokens
from offbeat.algorithms.sequences import sequence_average
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import TrainSection
from services.trainer.batch import StepBatch
from services.trainer.gradient import TokenRecord

Metrics = dict[str, float]

LOG_RATIO_MAX = 20.0
"""Keeps a mean of ratios finite where the engine was certain of the opposite."""


class Timer:
    """The seconds that a step and its parts take."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.seconds: Metrics = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a block as `perf/<name>_s`."""
        started = time.perf_counter()
        yield
        self.seconds[f"perf/{name}_s"] = time.perf_counter() - started

    def total_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._started

    def metrics(self, num_tokens: int) -> Metrics:
        """The parts, the step so far, and the rate for this many completion tokens."""
        step_s = self.total_s()
        rate = {"perf/trained_tok_s": num_tokens / step_s} if num_tokens else {}
        return {**self.seconds, "perf/step_s": step_s, **rate}


def reward_metrics(batch: StepBatch) -> Metrics:
    """Rewards over the samples that could be scored, in total and by part."""
    rewards_N = batch.rewards_GS[batch.rewards_GS.isfinite()]
    metrics: Metrics = {}
    if rewards_N.numel():
        metrics["reward"] = float(rewards_N.mean())
        metrics["reward_std"] = float(rewards_N.std(correction=0))
    parts: dict[str, list[float]] = {}
    for sample in batch.samples:
        for name, value in sample.rewards.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    metrics |= {f"rewards/{name}": sum(values) / len(values) for name, values in parts.items()}
    silent = without_signal(batch.rewards_GS).tolist()
    if batch.samples:
        sizes = [len(group) for group in batch.groups]
        num_silent = sum(size for size, is_silent in zip(sizes, silent, strict=True) if is_silent)
        metrics["frac_reward_zero_std"] = num_silent / sum(sizes)
    return metrics


def sample_metrics(samples: Sequence[Rollout], base_version: int) -> Metrics:
    """Lengths, and how many versions the policy had moved on when the samples were trained on."""
    if not samples:
        return {}
    lengths = [len(sample.completion_ids) for sample in samples]
    behind = [base_version - sample.policy_version for sample in samples]
    truncated = [sample.finish_reason == "length" for sample in samples]
    return {
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
        "num_tokens": sum(lengths) + sum(len(sample.prompt_ids) for sample in samples),
        "sample/staleness_mean": sum(behind) / len(behind),
        "sample/staleness_max": max(behind),
    }


def token_metrics(
    tokens: TokenRecord | None, samples: Sequence[Rollout], base_version: int, train: TrainSection
) -> Metrics:
    """How the policy differs from the one that sampled, and what the loss did about it.

    `ratio/staleness_0` is taken on samples of the very version that is trained, where it shows the
    mismatch between trainer and engine alone.
    """
    if tokens is None:
        return {}
    difference_N = tokens.logprobs_N - tokens.behaviour_logprobs_N
    ratio_N = difference_N.clamp(max=LOG_RATIO_MAX).exp()
    is_fresh_S = torch.tensor([sample.policy_version == base_version for sample in samples])
    fresh_ratio_N = ratio_N[is_fresh_S[tokens.samples_N]]
    metrics = {
        "ratio": ratio_N.mean(),
        "entropy": tokens.entropy_N.mean(),
        "sampling/sampling_logp_difference/mean": difference_N.abs().mean(),
        "sampling/sampling_logp_difference/max": difference_N.abs().max(),
        "sampling/importance_sampling_ratio/min": tokens.weights_N.min(),
        "sampling/importance_sampling_ratio/mean": tokens.weights_N.mean(),
        "sampling/importance_sampling_ratio/max": tokens.weights_N.max(),
        "sampling/importance_sampling_capped": _share(tokens.weights_N >= train.correction_cap),
        "sampling/importance_sampling_masked": _share(tokens.weights_N == 0),
        **_clip_metrics(tokens, train),
    }
    if fresh_ratio_N.numel():
        metrics["ratio/staleness_0"] = fresh_ratio_N.mean()
    if tokens.kl_N.numel():
        metrics["kl"] = tokens.kl_N.mean()
    return {name: float(value) for name, value in metrics.items()}


def packing_metrics(batches: Sequence[PackedTokens]) -> Metrics:
    """What was forwarded, padding included."""
    return {
        "batch/rows_per_step": sum(len(batch.ids_BT) for batch in batches),
        "batch/forwarded_tokens_per_step": sum(batch.ids_BT.numel() for batch in batches),
    }


def _clip_metrics(tokens: TokenRecord, train: TrainSection) -> dict[str, Tensor]:
    """How much of its ratio the loss has bounded; SAPO and DPPO bound no ratio."""
    term = LOSSES[train.loss].term
    low_N = (tokens.advantages_N < 0) & (tokens.ratio_N < 1 - train.epsilon_low)
    high_N = (tokens.advantages_N > 0) & (tokens.ratio_N > 1 + train.epsilon_high)
    if term is cispo:
        return {"cispo_clip_ratio": _share(high_N)}
    if term is not ppo_clip:
        return {}
    return {
        "clip_ratio/low_mean": _share(low_N),
        "clip_ratio/low_min": sequence_average(low_N.float(), tokens.samples_N).min(),
        "clip_ratio/high_mean": _share(high_N),
        "clip_ratio/high_max": sequence_average(high_N.float(), tokens.samples_N).max(),
        "clip_ratio/region_mean": _share(low_N | high_N),
    }


def _share(marked_N: Tensor) -> Tensor:
    """The share of the forwarded tokens that are marked."""
    return marked_N.float().mean()
