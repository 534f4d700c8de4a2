"""The loss by hand, in float64, and against autograd through the full table of logits."""

import math

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.cross_entropy import cross_entropy

POSITIONS, HIDDEN, VOCABULARY = 11, 6, 17


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=generator).to(dtype)
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    return hidden, head, targets


def test_a_loss_worked_by_hand() -> None:
    """Logits (ln 2, 0) and (0, ln 3): probabilities 2/3, 1/3 and 1/4, 3/4."""
    hidden = torch.tensor([[math.log(2), 0.0], [0.0, math.log(3)]])
    scores = cross_entropy(hidden, torch.eye(2), torch.tensor([0, 0]))
    assert scores.losses_N.tolist() == pytest.approx([math.log(3 / 2), math.log(4)], abs=1e-6)
    assert scores.is_best_N.tolist() == [True, False]
    entropy = [
        math.log(3) - 2 / 3 * math.log(2),
        math.log(4) - 3 / 4 * math.log(3),
    ]
    assert scores.entropy_N.tolist() == pytest.approx(entropy, abs=1e-6)


def test_the_gradient_is_that_of_the_full_table_in_float64() -> None:
    hidden, head, targets = inputs()
    plain = hidden.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(plain @ head.double().T, targets)
    expected.backward()
    chunked = hidden.clone().requires_grad_()
    scores = cross_entropy(chunked, head, targets, chunk_positions=4)
    loss = scores.losses_N.sum() / POSITIONS
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert plain.grad is not None
    assert chunked.grad is not None
    assert torch.allclose(chunked.grad.double(), plain.grad, atol=1e-7)


@pytest.mark.parametrize("chunk_positions", [1, 4, POSITIONS, 64])
def test_chunks_change_nothing(chunk_positions: int) -> None:
    hidden, head, targets = inputs()
    whole = cross_entropy(hidden, head, targets, chunk_positions=POSITIONS)
    parts = cross_entropy(hidden, head, targets, chunk_positions=chunk_positions)
    assert torch.allclose(parts.losses_N, whole.losses_N, atol=1e-6)
    assert parts.is_best_N.tolist() == whole.is_best_N.tolist()
    best = (hidden @ head.T).argmax(1) == targets
    assert whole.is_best_N.tolist() == best.tolist()


def test_the_loss_is_float32_whatever_the_weights_are() -> None:
    scores = cross_entropy(*inputs(torch.bfloat16))
    assert scores.losses_N.dtype is scores.entropy_N.dtype is torch.float32
