"""Reductions: the weight of each sequence's sum over tokens, from the lengths of all sequences.

`lengths_S` are those of the *whole* optimizer step and are known before the first backward, so the
gradient does not depend on how the step is cut into micro-batches. A token that is masked or not
forwarded leaves the sum, never the lengths.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Reduction = Callable[[Tensor, int], Tensor]
"""From the lengths (S,) and their upper bound to the weights (S,)."""


def sequence_mean(lengths_S: Tensor, length_max: int) -> Tensor:
    """1 / (S |o_i|): every sequence counts the same (GRPO, arXiv 2402.03300)."""
    return 1.0 / (lengths_S.clamp(min=1) * max(len(lengths_S), 1))


def token_mean(lengths_S: Tensor, length_max: int) -> Tensor:
    """1 / N, N = sum_i |o_i|: every token counts the same (DAPO, arXiv 2503.14476)."""
    return (1.0 / lengths_S.sum().clamp(min=1)).expand(lengths_S.shape)


def length_max_mean(lengths_S: Tensor, length_max: int) -> Tensor:
    """1 / (S L_max): a constant, so long wrong answers are not favoured (arXiv 2503.20783)."""
    return torch.ones_like(lengths_S) / max(len(lengths_S) * length_max, 1)
