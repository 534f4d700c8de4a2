"""Off-policy corrections: what the ratio is taken against, and how tokens are weighted.

Three policies are kept apart by their log-probabilities, each of shape (N,):

    behaviour  mu        the engine's, at the version that sampled; recorded, never recomputed
    proximal   pi_p      the trainer's own, at the version from which the update starts
    current    pi_theta  the trainer's own, with gradient

With one update a step pi_p equals pi_theta in value, so the ratio to it is 1 and only the weight
corrects. d = log pi_p - log mu, and e^d is the importance weight. Weights multiply the loss term
before the KL term is added; a weight of 0 takes a token out of the sum and out of nothing else: the
reductions keep its length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.algorithms.sequences import sequence_average, sequence_sum


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The base of the ratio and the weight of every token; both without gradient."""

    old_logprobs_N: Tensor
    weights_N: Tensor


CorrectionRule = Callable[[Tensor, Tensor, Tensor, float], Correction]
"""From proximal and behaviour log-probabilities, the sequence of each token, and the cap."""


def none(
    proximal_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, samples_N: Tensor, cap: float
) -> Correction:
    """The ratio is pi_theta / mu and only the loss's own bounds hold it (TRL AsyncGRPO)."""
    return Correction(
        old_logprobs_N=behaviour_logprobs_N, weights_N=torch.ones_like(behaviour_logprobs_N)
    )


def tis(
    proximal_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, samples_N: Tensor, cap: float
) -> Correction:
    """Decoupled PPO, the ratio pi_theta / pi_p, with the weight min(e^d, cap) of each token.

    Sources: arXiv 2505.24298; truncated importance sampling, fengyao.notion.site/off-policy-rl.
    """
    weights_N = (proximal_logprobs_N - behaviour_logprobs_N).exp().clamp(max=cap)
    return Correction(old_logprobs_N=proximal_logprobs_N, weights_N=weights_N)


def tis_sequence(
    proximal_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, samples_N: Tensor, cap: float
) -> Correction:
    """Decoupled PPO with the weight min(e^sum_t(d), cap) of the sequence.

    It weighs whole sequences as they are drawn, hence without bias up to the cap, but a long one
    soon reaches it (TRL, `sequence_truncate`).
    """
    difference_N = proximal_logprobs_N - behaviour_logprobs_N
    weights_N = sequence_sum(difference_N, samples_N).exp().clamp(max=cap)
    return Correction(old_logprobs_N=proximal_logprobs_N, weights_N=weights_N)


def mis(
    proximal_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, samples_N: Tensor, cap: float
) -> Correction:
    """Decoupled PPO with the weight e^d where 1 / cap <= e^d <= cap, else 0.

    A token on which trainer and engine disagree is rejected instead of biased (IcePop, arXiv
    2510.18855; TRL, `token_mask`).
    """
    ratio_N = (proximal_logprobs_N - behaviour_logprobs_N).exp()
    is_inside_N = (ratio_N >= 1 / cap) & (ratio_N <= cap)
    return Correction(old_logprobs_N=proximal_logprobs_N, weights_N=ratio_N.where(is_inside_N, 0.0))


def is_near_policy(
    logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    advantages_N: Tensor,
    samples_N: Tensor,
    threshold: float,
) -> Tensor:
    """(N,) False on sequences with A < 0 and mean_t(log mu - log pi_theta) above the threshold.

    What the policy has stopped saying teaches it nothing, and pushing it further down is unstable
    (off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556).
    """
    distance_N = sequence_average(behaviour_logprobs_N - logprobs_N, samples_N)
    return (advantages_N >= 0) | (distance_N <= threshold)


CORRECTIONS: dict[str, CorrectionRule] = {
    "none": none,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "mis": mis,
}
