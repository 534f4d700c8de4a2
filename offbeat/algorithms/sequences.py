"""Sums over the tokens of a sequence, given back to each of its tokens.

`samples_N` names the sequence of every token; the numbers need not be dense, and the tokens of a
sequence need not be adjacent, but all of them must be there.
"""

import torch
from torch import Tensor


def sequence_sum(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """(N,) For each token, the sum of the values of its sequence."""
    sums_S = values_N.new_zeros(len(samples_N.bincount())).index_add(0, samples_N, values_N)
    return sums_S[samples_N]


def sequence_average(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """(N,) For each token, the mean of the values of its sequence."""
    lengths_N = sequence_sum(torch.ones_like(values_N), samples_N)
    return sequence_sum(values_N, samples_N) / lengths_N
