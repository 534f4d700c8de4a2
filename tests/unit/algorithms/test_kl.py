"""The divergence from the reference."""

import pytest
import torch

from offbeat.algorithms.kl import k3


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    reference = torch.tensor([-1.0, -0.5, -1.5])
    expected = [0.0, 1.6487213 - 0.5 - 1, 0.6065307 + 0.5 - 1]
    assert k3(logprobs, reference).tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_is_the_exact_divergence_on_average_over_the_policy() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum().item()
    estimate = (policy * k3(policy.log(), reference.log())).sum().item()
    assert estimate == pytest.approx(exact, abs=1e-12)
