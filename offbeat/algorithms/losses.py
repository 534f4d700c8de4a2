"""Policy losses: a ratio and a term for every token, and the weight of every sequence.

    loss = sum_i c_i * sum_t (w_it * term_it + beta * kl_it)

The weights c come from `reductions`, the weights w from `corrections`, the divergence from `kl`.
A new loss is one function and one entry. Every term has shape (N,) and is to be minimised.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.algorithms.reductions import Reduction, length_max_mean, sequence_mean, token_mean
from offbeat.algorithms.sequences import sequence_average

SAPO_TEMPERATURE_POSITIVE = 1.0
SAPO_TEMPERATURE_NEGATIVE = 1.05
"""The paper's: to push one token down raises all others, so that fades out sooner."""
DPPO_SHIFT_MAX = 0.2
"""Bound of the change of a token's probability; prime-rl's, in both directions."""
DPPO_PENALTY = 1e-3
"""Weight of the squared log-ratio; prime-rl's."""


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The tokens of one micro-batch; a sequence never spans two of them."""

    logprobs_N: Tensor
    """log pi_theta, with gradient."""
    old_logprobs_N: Tensor
    """The base of the ratio: log pi_p or log mu, as the correction chooses."""
    advantages_N: Tensor
    samples_N: Tensor
    """The sequence to which each token belongs."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """The trust region [1 - low, 1 + high] of the ratio."""

    low: float
    high: float


def token_ratio(tokens: LossTokens) -> Tensor:
    """r_t = pi_theta / pi_old of the token."""
    return (tokens.logprobs_N - tokens.old_logprobs_N).exp()


def sequence_ratio(tokens: LossTokens) -> Tensor:
    """s = exp(mean_t(log pi_theta - log pi_old)) of the token's sequence (arXiv 2507.18071)."""
    return sequence_average(tokens.logprobs_N - tokens.old_logprobs_N, tokens.samples_N).exp()


def ppo_clip(ratio_N: Tensor, tokens: LossTokens, clip: Clip) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347; two bounds: DAPO, 2503.14476)."""
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    return -torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)


def cispo(ratio_N: Tensor, tokens: LossTokens, clip: Clip) -> Tensor:
    """-sg(min(r, 1 + high)) A log pi_theta: no token loses its gradient.

    Source: MiniMax-M1, arXiv 2506.13585. TRL's `epsilon_high` is the ceiling itself, here it is
    1 + high as in the paper; `low` has no effect.
    """
    ceiled_N = ratio_N.detach().clamp(max=1 + clip.high)
    return -ceiled_N * tokens.advantages_N * tokens.logprobs_N


def sapo(ratio_N: Tensor, tokens: LossTokens, clip: Clip) -> Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)): fades out instead of clipping (arXiv 2511.20347).

    At r = 1 the gradient is the unclipped one. The temperature takes the place of the clip.
    """
    tau_N = torch.full_like(ratio_N, SAPO_TEMPERATURE_NEGATIVE)
    tau_N[tokens.advantages_N > 0] = SAPO_TEMPERATURE_POSITIVE
    return -tokens.advantages_N * (4 / tau_N) * (tau_N * (ratio_N - 1)).sigmoid()


def dppo(ratio_N: Tensor, tokens: LossTokens, clip: Clip) -> Tensor:
    """-keep r A + kappa (log r)^2 with r = pi_theta / mu: pi_old has to be mu.

    A token is kept until pi_theta - mu, a difference of probabilities, exceeds the bound in the
    direction in which its advantage pushes; the bound takes the place of the clip. The penalty
    holds every token, whatever its advantage.
    Sources: binary total variation of DPPO, arXiv 2602.04879; penalty of Kimi K2.5, 2602.02276.
    """
    shift_N = tokens.logprobs_N.exp() - tokens.old_logprobs_N.exp()
    kept_N = shift_N.where(tokens.advantages_N > 0, -shift_N) <= DPPO_SHIFT_MAX
    penalty_N = DPPO_PENALTY * (tokens.logprobs_N - tokens.old_logprobs_N).square()
    return penalty_N - kept_N * ratio_N * tokens.advantages_N


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A policy loss by its parts."""

    ratio: Callable[[LossTokens], Tensor] = token_ratio
    term: Callable[[Tensor, LossTokens, Clip], Tensor]
    reduction: Reduction
    holds_silent_tokens: bool = False
    """Whether a token without advantage has a gradient too, so that it has to be forwarded."""


LOSSES: dict[str, Loss] = {
    "grpo": Loss(term=ppo_clip, reduction=sequence_mean),
    "dapo": Loss(term=ppo_clip, reduction=token_mean),
    # TRL divides by the tokens of a micro-batch, and the result depends on its size. Over a whole
    # step that is the mean over tokens.
    "bnpo": Loss(term=ppo_clip, reduction=token_mean),
    "dr_grpo": Loss(term=ppo_clip, reduction=length_max_mean),
    "cispo": Loss(term=cispo, reduction=token_mean),
    "gspo": Loss(ratio=sequence_ratio, term=ppo_clip, reduction=sequence_mean),
    "sapo": Loss(term=sapo, reduction=sequence_mean),
    "dppo": Loss(term=dppo, reduction=token_mean, holds_silent_tokens=True),
}
