"""The chunked head against the plain computation."""

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.logprobs import completion_logprobs

N, D, V = 7, 5, 11


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype)
    head = torch.randn(V, D, generator=generator).to(dtype)
    return hidden.requires_grad_(), head, torch.tensor([0, 3, 10, 3, 1, 9, 0])


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logprobs = torch.log_softmax(hidden @ head.T / temperature, -1)
    return logprobs.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("chunk_positions", [1, 3, 128])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_log_softmax_in_any_chunks(chunk_positions: int, temperature: float) -> None:
    hidden, head, targets = case(torch.float64)
    logprobs, entropy = completion_logprobs(
        hidden, head, targets, temperature=temperature, chunk_positions=chunk_positions
    )
    assert torch.allclose(logprobs, plain(hidden, head, targets, temperature), atol=1e-12)
    distribution = torch.distributions.Categorical(logits=hidden @ head.T / temperature)
    assert torch.allclose(entropy, distribution.entropy(), atol=1e-12)
    assert not entropy.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_gradient_is_the_true_one(temperature: float) -> None:
    hidden, head, targets = case(torch.float64)

    def logprobs(hidden: Tensor) -> Tensor:
        return completion_logprobs(
            hidden, head, targets, temperature=temperature, chunk_positions=3
        )[0]

    assert torch.autograd.gradcheck(logprobs, (hidden,))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_head_that_is_trained_has_its_gradient_too(temperature: float) -> None:
    hidden, head, targets = case(torch.float64)

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        return completion_logprobs(
            hidden, head, targets, temperature=temperature, chunk_positions=3
        )[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.requires_grad_()))


def test_float32_logits_keep_what_bfloat16_logits_would_round_away() -> None:
    hidden, head, targets = case(torch.bfloat16)
    logprobs, _ = completion_logprobs(hidden, head, targets)
    exact = plain(hidden.double(), head.double(), targets, 1.0)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.double(), exact, atol=1e-5)
    assert not torch.allclose(plain(hidden, head, targets, 1.0).double(), exact, atol=1e-3)
    logprobs.sum().backward()
    assert hidden.grad is not None
    (expected,) = torch.autograd.grad(exact.sum(), hidden)
    assert hidden.grad.dtype == torch.bfloat16
    assert torch.allclose(hidden.grad.float(), expected.float(), atol=0.05)


def test_a_second_derivative_is_refused() -> None:
    hidden, head, targets = case(torch.float64)
    logprobs, _ = completion_logprobs(hidden, head, targets)
    (gradient,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
