"""Corrections on the vectors of the algorithms reference: e^d = 1, 2.5 and 0.4, 1, 1.5, 2.5."""

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.corrections import CORRECTIONS, Correction, is_near_policy
from offbeat.algorithms.losses import LOSSES, Clip, LossTokens

IMPORTANCE = torch.tensor([1, 2.5, 0.4, 1, 1.5, 2.5], dtype=torch.float64)
PROXIMAL = torch.tensor([-1, -2, -3, -1, -2, -3], dtype=torch.float64)
BEHAVIOUR = PROXIMAL - IMPORTANCE.log()
SAMPLES = torch.tensor([7, 7, 3, 3, 3, 3])
CLIP = Clip(low=0.2, high=0.28)


def corrected(name: str, cap: float = 2.0) -> Correction:
    return CORRECTIONS[name](PROXIMAL, BEHAVIOUR, SAMPLES, cap)


def approx(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "cap", "weights"),
    [
        ("none", 2.0, [1, 1, 1, 1, 1, 1]),
        ("tis", 2.0, [1, 2, 0.4, 1, 1.5, 2]),
        ("tis_sequence", 2.0, [2, 2, 1.5, 1.5, 1.5, 1.5]),
        ("tis_sequence", 3.0, [2.5, 2.5, 1.5, 1.5, 1.5, 1.5]),
        ("mis", 2.0, [1, 0, 0, 1, 1.5, 0]),
        ("mis", 2.5 + 1e-9, [1, 2.5, 0.4, 1, 1.5, 2.5]),
    ],
)
def test_the_weights_are_those_of_the_reference(
    name: str, cap: float, weights: list[float]
) -> None:
    assert corrected(name, cap).weights_N.tolist() == approx(weights)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_only_without_a_correction_the_ratio_is_taken_against_the_behaviour(name: str) -> None:
    base = BEHAVIOUR if name == "none" else PROXIMAL
    assert torch.equal(corrected(name).old_logprobs_N, base)


@pytest.mark.parametrize(("name", "weight"), [("tis", 2.0), ("tis_sequence", 2.0), ("mis", 0.0)])
def test_weights_stay_finite_where_the_engine_was_certain_of_the_opposite(
    name: str, weight: float
) -> None:
    behaviour, samples = torch.tensor([-1000.0]), torch.tensor([0])
    correction = CORRECTIONS[name](torch.tensor([-0.1]), behaviour, samples, 2.0)
    assert correction.weights_N.tolist() == [weight]


def decoupled(logprobs_N: Tensor, advantages_N: Tensor) -> tuple[list[float], list[float]]:
    """Terms and slopes of PPO with `tis`."""
    current_N = logprobs_N.clone().requires_grad_()
    correction, loss = corrected("tis"), LOSSES["dapo"]
    tokens = LossTokens(
        logprobs_N=current_N,
        old_logprobs_N=correction.old_logprobs_N,
        advantages_N=advantages_N,
        samples_N=SAMPLES,
    )
    terms_N = correction.weights_N * loss.term(loss.ratio(tokens), tokens, CLIP)
    terms_N.sum().backward()
    assert current_N.grad is not None
    return terms_N.tolist(), current_N.grad.tolist()


def test_at_the_proximal_policy_the_decoupled_gradient_is_weight_times_advantage() -> None:
    """pi_theta = pi_p: the gradient is (pi_p / mu) A grad log pi."""
    _, slopes = decoupled(PROXIMAL, torch.tensor([0.5, 0.5, -1, -1, -1, -1]))
    assert slopes == approx([-0.5, -1.0, 0.4, 1.0, 1.5, 2.0])


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_behaviour() -> None:
    """All three policies differ: u = pi_theta / pi_p, w = min(pi_p / mu, 2), term -w min(u A, ..).

    The second token has u = 2 but pi_theta / mu = 5, the third u = 0.5 but pi_theta / mu = 0.2.
    """
    ratio = torch.tensor([1.1, 2.0, 0.5, 1.2, 2.0, 0.9], dtype=torch.float64)
    advantages = torch.tensor([1, 1, -1, -1, -1, -1], dtype=torch.float64)
    terms, slopes = decoupled(PROXIMAL + ratio.log(), advantages)
    assert terms == approx([-1.1, -2 * 1.28, 0.4 * 0.8, 1.2, 1.5 * 2.0, 2 * 0.9])
    assert slopes == approx([-1.1, 0, 0, 1.2, 3.0, 1.8])


def test_a_masked_token_leaves_the_sum_and_keeps_the_length() -> None:
    """Of two tokens with term -1 one is masked: -1/2, not -1."""
    proximal, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    samples, loss = torch.tensor([0, 0]), LOSSES["dapo"]
    correction = CORRECTIONS["mis"](proximal, behaviour, samples, 2.0)
    tokens = LossTokens(
        logprobs_N=proximal,
        old_logprobs_N=correction.old_logprobs_N,
        advantages_N=torch.ones(2),
        samples_N=samples,
    )
    terms_N = correction.weights_N * loss.term(loss.ratio(tokens), tokens, CLIP)
    assert (terms_N * loss.reduction(torch.tensor([2]), 8)[samples]).sum().item() == -0.5


@pytest.mark.parametrize(
    ("threshold", "near"),
    [(0.5, [True] * 6), (0.2, [False] * 2 + [True] * 4), (0.1, [False] * 6)],
)
def test_a_negative_sequence_that_the_policy_left_is_masked(
    threshold: float, near: list[bool]
) -> None:
    """mean_t(log mu - log pi) is 0.458145 for the first sequence and 0.101366 for the second."""
    policy, behaviour = BEHAVIOUR, PROXIMAL
    advantages = torch.full((6,), -0.5)
    assert is_near_policy(policy, behaviour, advantages, SAMPLES, threshold).tolist() == near


def test_a_negative_sequence_that_has_become_more_likely_is_not_masked() -> None:
    assert is_near_policy(PROXIMAL, BEHAVIOUR, torch.full((6,), -0.5), SAMPLES, 0.0).all()


def test_a_sequence_without_a_negative_advantage_is_never_masked() -> None:
    advantages = torch.tensor([0.5, 0.5, 0, 0, 0, 0])
    far = torch.full((6,), -50.0)
    assert is_near_policy(far, BEHAVIOUR, advantages, SAMPLES, 0.0).all()
