"""Losses on the worked example of the algorithms reference, to all its printed digits.

Two completions with pi_old = mu. The ratios 1.5 and 0.5 are outside of the trust region on the side
where the clip acts, 5 on the side where it does not.
"""

import pytest
import torch

from offbeat.algorithms.losses import LOSSES, Clip, LossTokens, sequence_ratio

LENGTHS = torch.tensor([2, 4])
LENGTH_MAX = 8
OLD = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.2, 0.1], dtype=torch.float64).log()
RATIO = torch.tensor([1, 1.5, 0.5, 1, 1.2, 5], dtype=torch.float64)
ADVANTAGES = torch.tensor([0.5, 0.5, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
SAMPLES = torch.tensor([0, 0, 1, 1, 1, 1])
CLIP = Clip(low=0.2, high=0.28)
CEILING_2 = Clip(low=0.2, high=1.0)
"""The example's CISPO has its ceiling, 1 + high, at 2."""

PPO = ([-0.5, -0.64, 0.4, 0.5, 0.6, 2.5], [-0.5, 0, 0, 0.5, 0.6, 2.5])
WORKED_EXAMPLE = {
    "grpo": PPO,
    "dapo": PPO,
    "bnpo": PPO,
    "dr_grpo": PPO,
    "cispo": (
        [0.346574, 0.215762, -0.346574, -0.346574, -0.856270, -0.693147],
        [-0.5, -0.75, 0.25, 0.5, 0.6, 1.0],
    ),
    "sapo": (
        [-1, -1.244919, 0.707969, 0.952381, 1.052015, 1.876621],
        [-0.5, -0.7050, 0.2335, 0.5, 0.5934, 0.1456],
    ),
    "gspo": (
        [-0.612372] * 2 + [0.658037] * 4,
        # s = 1.224745 and 1.316074 are not clipped: every token has the slope -s A.
        [-0.612372] * 2 + [0.658037] * 4,
    ),
    "dppo": (
        [-0.5, 0.000164, 0.000480, 0.5, 0.600033, 2.502590],
        [-0.5, 0.0008, -0.0014, 0.5, 0.6004, 2.5032],
    ),
}


def worked_example() -> LossTokens:
    return LossTokens(
        logprobs_N=(OLD + RATIO.log()).requires_grad_(),
        old_logprobs_N=OLD,
        advantages_N=ADVANTAGES,
        samples_N=SAMPLES,
    )


def clip_of(name: str) -> Clip:
    return CEILING_2 if name == "cispo" else CLIP


def test_the_worked_example_covers_every_loss() -> None:
    assert WORKED_EXAMPLE.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", WORKED_EXAMPLE)
def test_each_loss_has_the_terms_and_slopes_of_the_worked_example(name: str) -> None:
    tokens, loss = worked_example(), LOSSES[name]
    terms_N = loss.term(loss.ratio(tokens), tokens, clip_of(name))
    terms_N.sum().backward()
    expected_terms, expected_slopes = WORKED_EXAMPLE[name]
    assert terms_N.tolist() == pytest.approx(expected_terms, abs=5.1e-7)
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.tolist() == pytest.approx(expected_slopes, abs=5.1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 0.215),
        ("dapo", 0.476667),
        ("bnpo", 0.476667),
        ("dr_grpo", 0.17875),
        ("cispo", -0.280038),
        ("gspo", 0.022832),
        ("sapo", 0.012394),
        ("dppo", 0.517211),
    ],
)
def test_each_loss_reduces_the_worked_example_to_its_value(name: str, expected: float) -> None:
    tokens, loss = worked_example(), LOSSES[name]
    weights_S = loss.reduction(LENGTHS.double(), LENGTH_MAX)
    terms_N = loss.term(loss.ratio(tokens), tokens, clip_of(name))
    assert (terms_N * weights_S[SAMPLES]).sum().item() == pytest.approx(expected, abs=5.1e-7)


@pytest.mark.parametrize("like", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cispo", (-0.139737, -0.280038, -0.105014)),
        ("sapo", (0.012394, 0.390678, 0.146504)),
        ("dppo", (0.325429, 0.517211, 0.193954)),
    ],
)
def test_every_term_goes_with_every_reduction(
    name: str, like: str, expected: tuple[float, float, float]
) -> None:
    tokens, loss = worked_example(), LOSSES[name]
    weights_S = LOSSES[like].reduction(LENGTHS.double(), LENGTH_MAX)
    terms_N = loss.term(loss.ratio(tokens), tokens, clip_of(name))
    value = dict(zip(["grpo", "dapo", "dr_grpo"], expected, strict=True))[like]
    assert (terms_N * weights_S[SAMPLES]).sum().item() == pytest.approx(value, abs=5.1e-7)


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens() -> None:
    ratios = sequence_ratio(worked_example()).tolist()
    assert ratios == pytest.approx([1.5**0.5] * 2 + [3.0**0.25] * 4, abs=1e-12)


def test_a_gspo_sequence_outside_its_trust_region_has_no_gradient() -> None:
    tokens, gspo = worked_example(), LOSSES["gspo"]
    terms_N = gspo.term(gspo.ratio(tokens), tokens, Clip(low=3e-4, high=4e-4))
    terms_N.sum().backward()
    assert terms_N.tolist() == pytest.approx([-0.5002] * 2 + [0.658037] * 4, abs=1e-6)
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad.tolist()[:2] == [0, 0]


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dppo"])
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    tokens = LossTokens(
        logprobs_N=OLD.clone().requires_grad_(),
        old_logprobs_N=OLD,
        advantages_N=ADVANTAGES,
        samples_N=SAMPLES,
    )
    loss = LOSSES[name]
    loss.term(loss.ratio(tokens), tokens, CLIP).sum().backward()
    assert tokens.logprobs_N.grad is not None
    assert torch.allclose(tokens.logprobs_N.grad, -ADVANTAGES, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_loss_that_says_so_moves_a_token_without_advantage(name: str) -> None:
    tokens = worked_example()
    silent = LossTokens(**{**vars(tokens), "advantages_N": torch.zeros(6)})
    loss = LOSSES[name]
    loss.term(loss.ratio(silent), silent, CLIP).sum().backward()
    assert tokens.logprobs_N.grad is not None
    assert bool(tokens.logprobs_N.grad.any()) == loss.holds_silent_tokens


@pytest.mark.parametrize("name", LOSSES)
def test_weights_stay_finite_without_a_token(name: str) -> None:
    reduction = LOSSES[name].reduction
    assert reduction(torch.tensor([0]), LENGTH_MAX).isfinite().all()
    assert reduction(torch.tensor([]), LENGTH_MAX).tolist() == []
