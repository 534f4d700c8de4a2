"""Cross-entropy at the targets alone, without the full table of logits.

    loss = 1/N * sum_n -log p(y_n | h_n),    N = targets of the whole optimizer step

N is known before the first backward, so neither micro-batches nor ranks change the gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from offbeat.algorithms.logprobs import CHUNK_POSITIONS, scored_targets


@dataclass(frozen=True, kw_only=True)
class TargetScores:
    """What the model makes of each target."""

    losses_N: Tensor
    """-log p of the target in nats, float32, with gradient."""
    entropy_N: Tensor
    is_best_N: Tensor
    """Whether no token is more likely: the share of these is TRL's `mean_token_accuracy`."""


def cross_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_positions: int = CHUNK_POSITIONS,
) -> TargetScores:
    """The scores of the targets; `hidden_ND[n]` is the state that predicts `targets_N[n]`."""
    scored = scored_targets(
        hidden_ND, head_VD, targets_N, chunk_positions=chunk_positions, finds_best=True
    )
    return TargetScores(
        losses_N=-scored.logprobs_N,
        entropy_N=scored.entropy_N,
        is_best_N=scored.best_N == targets_N,
    )
