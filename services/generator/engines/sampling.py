"""Draws tokens so that a sample depends on its seed and its logits, and on nothing else.

Each sample has its own stream of uniforms, one a step, and maps each to a token through the inverse
of the cumulative distribution. Which other samples share the batch, and in which order, changes no
draw. Axes: N samples, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import IntegrityError
from services.generator.engines.base import Sampling


def uniforms(seed: int, count: int) -> Tensor:
    """The first numbers of the stream: float32 in [0, 1), from the counter-based Philox."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).random(count, np.float32))


def choose(logits_NV: Tensor, uniforms_N: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """A token for each sample and its log-probability; `logits_NV` is float32 and is overwritten.

    Raises `IntegrityError` for logits that are not finite.
    """
    if sampling.temperature == 0:
        best_N, ids_N = logits_NV.max(-1)
        logprobs_N = best_N - logits_NV.logsumexp(-1)
    else:
        logits_NV.div_(sampling.temperature)
        ids_N, logprobs_N = _draw(keep_likely(logits_NV, sampling), uniforms_N[:, None])
    if not logprobs_N.isfinite().all():
        raise IntegrityError(
            "the policy's logits are not finite: the adapter or the base is broken"
        )
    return ids_N, logprobs_N


def keep_likely(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Minus infinity outside the `top_k` most likely tokens, then outside the smallest set whose
    probability reaches `top_p`."""
    if 0 < sampling.top_k < logits_NV.shape[-1]:
        least_N1 = logits_NV.topk(sampling.top_k).values[:, -1:]
        logits_NV.masked_fill_(logits_NV < least_N1, -torch.inf)
    if sampling.top_p < 1:
        sorted_NV, order_NV = logits_NV.sort(descending=True, stable=True)
        probs_NV = sorted_NV.softmax(-1)
        # A token stays while those before it have not reached top_p: the first always does.
        beyond_NV = probs_NV.cumsum(-1) - probs_NV >= sampling.top_p
        logits_NV.scatter_(1, order_NV, sorted_NV.masked_fill_(beyond_NV, -torch.inf))
    return logits_NV


def _draw(logits_NV: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    weights_NV = logits_NV.sub_(logits_NV.amax(-1, keepdim=True)).exp_()
    cumulative_NV = weights_NV.cumsum(-1)
    total_N1 = cumulative_NV[:, -1:]
    # Below the total also after rounding, so that the token found has a positive probability.
    points_N1 = torch.minimum(
        uniforms_N1 * total_N1, total_N1.nextafter(torch.zeros_like(total_N1))
    )
    ids_N1 = torch.searchsorted(cumulative_NV, points_N1, right=True)
    ids_N1.clamp_(max=logits_NV.shape[-1] - 1)
    return ids_N1[:, 0], (weights_NV.gather(1, ids_N1) / total_N1).log()[:, 0]
