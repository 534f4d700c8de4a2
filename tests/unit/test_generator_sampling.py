"""Drawing tokens, on distributions worked by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import IntegrityError
from services.generator.engines.base import Sampling
from services.generator.engines.sampling import choose, keep_likely, uniforms

PROBS = (0.5, 0.3, 0.15, 0.05)
LOGITS = torch.tensor([PROBS]).log() + 7.0


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)


def draw(uniform: float, rule: Sampling) -> tuple[int, float]:
    ids_N, logprobs_N = choose(LOGITS.clone(), torch.tensor([uniform]), rule)
    return int(ids_N[0]), float(logprobs_N[0])


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.96, 3)]
)
def test_a_uniform_picks_the_token_in_whose_share_it_falls(uniform: float, token: int) -> None:
    assert draw(uniform, sampling()) == (token, pytest.approx(math.log(PROBS[token]), abs=1e-6))


def test_temperature_reshapes_the_distribution_and_its_logprobs() -> None:
    # At temperature 0.5 the weights are the squares: 0.25, 0.09, 0.0225, 0.0025; sum 0.365.
    token, logprob = draw(0.7, sampling(temperature=0.5))
    assert (token, logprob) == (1, pytest.approx(math.log(0.09 / 0.365), abs=1e-6))


def test_top_k_renormalises_over_the_k_most_likely() -> None:
    token, logprob = draw(0.999, sampling(top_k=2))
    assert (token, logprob) == (1, pytest.approx(math.log(0.3 / 0.8), abs=1e-6))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # 0.5 is not yet 0.6, so the second token stays; then 0.8 is enough.
    token, logprob = draw(0.999, sampling(top_p=0.6))
    assert (token, logprob) == (1, pytest.approx(math.log(0.3 / 0.8), abs=1e-6))
    assert draw(0.999, sampling(top_p=0.01)) == (0, 0.0)


def test_top_p_holds_whatever_the_order_of_the_tokens() -> None:
    logits_NV = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()
    kept_NV = keep_likely(logits_NV, sampling(top_p=0.6))
    assert kept_NV.isfinite().tolist() == [[False, True, False, True]]


def test_greedy_takes_the_best_token_with_its_plain_logprob() -> None:
    assert draw(0.99, sampling(temperature=0)) == (0, pytest.approx(math.log(0.5), abs=1e-6))


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(IntegrityError, match="not finite"):
        choose(torch.tensor([[0.0, math.nan]]), torch.tensor([0.5]), sampling())


@settings(deadline=None, max_examples=200)
@given(
    logits=st.lists(st.floats(-90, 90, width=32), min_size=2, max_size=50),
    uniform=st.floats(0, 1 - 2**-24, width=32),
    top_k=st.integers(0, 5),
)
def test_no_uniform_draws_a_token_without_probability(
    logits: list[float], uniform: float, top_k: int
) -> None:
    ids_N, logprobs_N = choose(
        torch.tensor([logits]), torch.tensor([uniform]), sampling(top_k=top_k)
    )
    assert 0 <= int(ids_N[0]) < len(logits)
    assert math.isfinite(float(logprobs_N[0]))


def test_streams_are_those_of_their_seeds() -> None:
    assert torch.equal(uniforms(7, 5), uniforms(7, 9)[:5])
    assert not torch.equal(uniforms(7, 5), uniforms(8, 5))
    assert not torch.equal(uniforms(7, 5), uniforms(7 + 2**32, 5))
    many = uniforms(2**63 - 1, 100_000)
    assert float(many.min()) >= 0
    assert float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=0.005)


def test_frequencies_are_the_probabilities() -> None:
    logits_NV = torch.tensor(PROBS).log().repeat(20_000, 1)
    ids_N, _ = choose(logits_NV, uniforms(3, 20_000), sampling())
    shares = ids_N.bincount(minlength=4) / 20_000
    assert shares.tolist() == pytest.approx(PROBS, abs=0.01)
