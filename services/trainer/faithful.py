"""Does packing change anything? One completion (or example) of a batch, in its row and alone.

A model silently lets one completion see another where its attention ignores the mask, and which
kernel runs, hence whether it honours the mask, may depend on the shape of the batch.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from offbeat.algorithms.packing import Completion, PackedBatch, PackedTokens, Row

ShapeClass = tuple[int, int]
"""Rows and tokens a row, each to the next power of two."""

PACKING_ERROR_MAX = 0.05
"""Relative to the largest log-probability. bfloat16 rounding is about 0.003; a soft cap on the
logits, a scale or an ignored mask is above 0.1."""
TOKENS_COMPARED_MAX = 16
"""The end of a completion has seen everything that it must not see."""


class Distributions(Protocol):
    """What is compared."""

    def distributions(self, batch: PackedTokens) -> Tensor:
        """log pi at each predictor of a packed batch: (N, V)."""
        ...

    def plain_distributions(self, ids: tuple[int, ...], num_last: int) -> Tensor:
        """log pi at the last places of one sequence: (num_last, V)."""
        ...


def unscored(ids: tuple[int, ...]) -> Completion:
    """A completion of which only the forward matters."""
    return Completion(sample=0, ids=ids, behaviour_logprobs=(0.0,) * len(ids), advantage=0.0)


def smallest_batch() -> PackedBatch:
    """Two completions of one prompt: what every model is tried with when it is loaded.

    The first ids of many vocabularies are special tokens, on which a model may compute with numbers
    so large that mere rounding looks like a fault.
    """
    row = Row(prompt_ids=(20, 21, 22), completions=(unscored((23, 24)), unscored((25, 26))))
    return PackedBatch.of_rows([row])


def shape_class(batch: PackedTokens) -> ShapeClass:
    """The class of the batch's shape."""
    num_rows, width = batch.ids_BT.shape
    return (num_rows - 1).bit_length(), (width - 1).bit_length()


def packing_error(policy: Distributions, batch: PackedTokens) -> float:
    """How far the last completion of the fullest row is from the same completion by itself:
    largest difference of log pi, relative to the largest log pi."""
    row = int(batch.segments_BT.amax(1).argmax())
    segments_T = batch.segments_BT[row]
    prompt_P = (segments_T == 0).nonzero()[:, 0]
    own_C = (segments_T == segments_T.amax()).nonzero()[:, 0]
    # Without a prompt nothing predicts the first token.
    predictors_C = torch.cat([prompt_P[-1:], own_C[:-1]])
    num_last = min(len(predictors_C), TOKENS_COMPARED_MAX)
    places_N = row * batch.ids_BT.shape[1] + predictors_C[-num_last:]
    packed_NV = policy.distributions(replace(batch, predictors_N=places_N))
    ids = (*batch.ids_BT[row, prompt_P].tolist(), *batch.ids_BT[row, own_C].tolist())
    plain_NV = policy.plain_distributions(ids, num_last)
    return float((packed_NV - plain_NV).abs().max() / plain_NV.abs().max())
