"""Shaping of the reward by length."""

from torch import Tensor


def soft_overlong(lengths: Tensor, length_max: int, cache: int) -> Tensor:
    """clip(((L - c) - n) / c, -1, 0): falls over the last c of L tokens; shape as the lengths.

    With c = 0 it is 0 up to L and -1 beyond. Source: DAPO, arXiv 2503.14476, equation 13.
    """
    return ((length_max - cache - lengths) / max(cache, 1)).clamp(-1.0, 0.0)
