"""Log-probabilities of chosen tokens without the full table of logits.

The head runs in the precision of the weights it is given: float32 in production, because bfloat16
logits are off by up to 1/16 nat, and that is most of what separates a trainer from its engine. It
runs on a few positions at a time, and only where a completion token is predicted.

The head itself is not trained (LoRA on it is refused). The derivative with regard to the hidden
state is then the same vector whatever the loss, up to one factor for each position:

    d log p(y | h) / dh = (W_y - sum_v p_v W_v) / temperature

so the forward computes it while the probabilities are at hand, and the backward only scales it:
no logits are kept and none are computed twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_POSITIONS = 128
"""Positions whose logits exist at once: 128 x 152k float32 logits are 78 MB, twice."""


def completion_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    backward_head_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_positions: int = CHUNK_POSITIONS,
) -> tuple[Tensor, Tensor]:
    """log softmax(h W^T / temperature) at the targets, and the entropy of each distribution.

    `hidden_ND[n]` is the state that predicts `targets_N[n]`. `backward_head_VD` holds the same
    weights in the precision in which the gradient may be computed. Both results have the precision
    of `head_VD`; the entropy has no gradient.
    """
    return _CompletionLogprobs.apply(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        hidden_ND, head_VD, backward_head_VD, targets_N, temperature, chunk_positions
    )


class _CompletionLogprobs(torch.autograd.Function):
    """`ctx` is Any because torch gives it no more precise type."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_ND: Tensor,
        head_VD: Tensor,
        backward_head_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_positions: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = head_VD.new_empty(len(targets_N))
        entropy_N = head_VD.new_empty(len(targets_N))
        slope_ND = torch.empty_like(hidden_ND)
        # Fresh pages for every chunk would cost as much as the arithmetic on them.
        buffers_CV = head_VD.new_empty(2, min(chunk_positions, len(targets_N)), len(head_VD))
        for start in range(0, len(targets_N), chunk_positions):
            part = slice(start, start + chunk_positions)
            targets_C1 = targets_N[part, None]
            logits_CV, logprobs_CV = buffers_CV[:, : len(targets_C1)]
            torch.mm(hidden_ND[part].to(head_VD.dtype), head_VD.T, out=logits_CV)
            torch.log_softmax(logits_CV.div_(temperature), -1, out=logprobs_CV)
            logprobs_N[part] = logprobs_CV.gather(1, targets_C1)[:, 0]
            probs_CV = torch.exp(logprobs_CV, out=logits_CV)
            entropy_N[part] = -logprobs_CV.mul_(probs_CV).sum(1)
            if ctx.needs_input_grad[0]:
                residual_CV = probs_CV.neg_()
                residual_CV.scatter_add_(1, targets_C1, torch.ones_like(residual_CV[:, :1]))
                slope_CD = residual_CV.to(backward_head_VD.dtype) @ backward_head_VD
                slope_ND[part] = slope_CD.div_(temperature)
        ctx.save_for_backward(slope_ND)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        *grad_outputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        (slope_ND,) = ctx.saved_tensors
        gradient_ND = (grad_outputs[0][:, None] * slope_ND).to(slope_ND.dtype)
        return gradient_ND, None, None, None, None, None
