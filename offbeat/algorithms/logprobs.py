"""Log-probabilities of chosen tokens without the full table of logits.

Logits are float32 whatever the head's own type, because bfloat16 logits are off by up to 1/16 nat,
and that is most of what separates a trainer from its engine. The head runs on a few positions at a
time, and only where a completion token is predicted.

With LoRA the head itself is not trained. The derivative with regard to the hidden state is then the
same vector whatever the loss, up to one factor for each position:

    d log p(y | h) / dh = (W_y - sum_v p_v W_v) / temperature

so the forward computes it while the probabilities are at hand, and the backward only scales it:
no logits are kept and none are computed twice. In full fine-tuning the head has a gradient too,
which needs those factors, so the backward computes the logits again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends import mkldnn

CHUNK_POSITIONS = 64
"""Positions whose logits exist at once: 64 x 152k float32 logits are 39 MB, twice."""
HEAD_ROWS = 2048
"""Rows of the head that are converted at once: 2048 x 8k in float32 are 67 MB."""


def completion_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_positions: int = CHUNK_POSITIONS,
) -> tuple[Tensor, Tensor]:
    """log softmax(h W^T / temperature) at the targets, and the entropy of each distribution.

    `hidden_ND[n]` is the state that predicts `targets_N[n]`. Both results are float32, or
    float64 as the head; the entropy has no gradient.
    """
    scored = scored_targets(
        hidden_ND, head_VD, targets_N, temperature=temperature, chunk_positions=chunk_positions
    )
    return scored.logprobs_N, scored.entropy_N


class ScoredTargets(NamedTuple):
    """What the distributions say of the targets."""

    logprobs_N: Tensor
    entropy_N: Tensor
    best_N: Tensor
    """The most likely token of each distribution; empty where it was not asked for."""


def scored_targets(
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    chunk_positions: int = CHUNK_POSITIONS,
    finds_best: bool = False,
) -> ScoredTargets:
    """As `completion_logprobs`; only the log-probabilities have a gradient."""
    outputs: tuple[Tensor, ...] = _ScoredTargets.apply(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType, reportAssignmentType]
        hidden_ND, head_VD, targets_N, temperature, chunk_positions, finds_best
    )
    return ScoredTargets(*outputs)


def float_logits(hidden_ND: Tensor, head_VD: Tensor, out_NV: Tensor) -> Tensor:
    """h W^T in `out_NV`, in its type.

    The factors convert exactly; a float32 copy of the whole head would cost memory and win no time.
    A CPU with bfloat16 units multiplies float32 factors that are bfloat16 numbers with them, and
    adds in float32, so that nothing is lost there either.
    """
    hidden_ND = hidden_ND.to(out_NV.dtype)
    products = "bf16" if head_VD.dtype == torch.bfloat16 else "none"
    *_, before = mkldnn.set_flags(_fp32_precision=products)  # pyright: ignore[reportUnknownMemberType]
    try:
        for start in range(0, len(head_VD), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            torch.mm(hidden_ND, head_VD[rows].to(out_NV.dtype).T, out=out_NV[:, rows])
    finally:
        mkldnn.set_flags(_fp32_precision=before)  # pyright: ignore[reportUnknownMemberType]
    return out_NV


class _ScoredTargets(torch.autograd.Function):
    """`ctx` is Any because torch gives it no more precise type."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk_positions: int,
        finds_best: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(head_VD.dtype, torch.float32)
        logprobs_N, entropy_N = head_VD.new_empty(2, len(targets_N), dtype=dtype)
        best_N = targets_N.new_empty(len(targets_N) if finds_best else 0)
        is_head_trained = ctx.needs_input_grad[1]
        needs_slope = ctx.needs_input_grad[0] and not is_head_trained
        slope_ND = torch.empty_like(hidden_ND) if needs_slope else hidden_ND
        # Fresh pages for every chunk would cost as much as the arithmetic on them.
        num_buffered = min(chunk_positions, len(targets_N))
        buffers_CV = head_VD.new_empty(2, num_buffered, len(head_VD), dtype=dtype)
        for start in range(0, len(targets_N), chunk_positions):
            part = slice(start, start + chunk_positions)
            targets_C1 = targets_N[part, None]
            logits_CV, logprobs_CV = buffers_CV[:, : len(targets_C1)]
            float_logits(hidden_ND[part], head_VD, logits_CV)
            torch.log_softmax(logits_CV.div_(temperature), -1, out=logprobs_CV)
            logprobs_N[part] = logprobs_CV.gather(1, targets_C1)[:, 0]
            if finds_best:
                best_N[part] = logprobs_CV.argmax(1)
            probs_CV = torch.exp(logprobs_CV, out=logits_CV)
            entropy_N[part] = -logprobs_CV.mul_(probs_CV).sum(1)
            if needs_slope:
                residual_CV = probs_CV.neg_()
                residual_CV.scatter_add_(1, targets_C1, torch.ones_like(residual_CV[:, :1]))
                slope_CD = residual_CV.to(head_VD.dtype) @ head_VD
                slope_ND[part] = slope_CD.div_(temperature)
        ctx.save_for_backward(slope_ND, *((head_VD, targets_N) if is_head_trained else ()))
        ctx.temperature, ctx.chunk_positions = temperature, chunk_positions
        ctx.mark_non_differentiable(entropy_N, best_N)
        return logprobs_N, entropy_N, best_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,  # noqa: ANN401
        *grad_outputs: Tensor,
    ) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[1]:
            hidden_ND, head_VD, targets_N = ctx.saved_tensors
            gradient_ND, gradient_VD = _with_head(
                grad_outputs[0],
                hidden_ND,
                head_VD,
                targets_N,
                temperature=ctx.temperature,
                chunk_positions=ctx.chunk_positions,
            )
            return gradient_ND, gradient_VD, None, None, None, None
        (slope_ND,) = ctx.saved_tensors
        gradient_ND = (grad_outputs[0][:, None] * slope_ND).to(slope_ND.dtype)
        return gradient_ND, None, None, None, None, None


def _with_head(
    factors_N: Tensor,
    hidden_ND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_positions: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states and head: with r = (1_y - p) * factor / temperature at each
    position, these are r W and r^T h."""
    gradient_ND = torch.empty_like(hidden_ND)
    gradient_VD = torch.zeros_like(head_VD, dtype=factors_N.dtype)
    for start in range(0, len(targets_N), chunk_positions):
        part = slice(start, start + chunk_positions)
        targets_C1 = targets_N[part, None]
        logits_CV = factors_N.new_empty(len(targets_C1), len(head_VD))
        float_logits(hidden_ND[part], head_VD, logits_CV)
        residual_CV = logits_CV.div_(temperature).softmax(-1).neg_()
        residual_CV.scatter_add_(1, targets_C1, torch.ones_like(residual_CV[:, :1]))
        residual_CV.mul_(factors_N[part, None] / temperature)
        rounded_CV = residual_CV.to(head_VD.dtype)
        gradient_ND[part] = rounded_CV @ head_VD
        gradient_VD += rounded_CV.T @ hidden_ND[part]
    return gradient_ND, gradient_VD.to(head_VD.dtype)
