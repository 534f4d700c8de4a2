"""The canary's rule, on numbers worked by hand."""

import math

import pytest

from offbeat.canary import TOLERANCES, CanaryTolerance, verify_canary
from offbeat.contracts.weights import Canary

TOLERANCE = CanaryTolerance(mean_abs_max=0.15, change_min=0.2)

CANARY = Canary(
    prompt_ids=(1,),
    completion_ids=(10, 11, 12),
    logprobs=(-1.0, -0.5, -2.0),
    parent_logprobs=(-1.0, -0.8, -2.4),
)
"""|n - p|^2 = 0.3^2 + 0.4^2 = 0.25, so the change is 0.5 nats."""


def test_the_trainers_own_answer_passes() -> None:
    verdict = verify_canary(CANARY, (10, 11, 12), (-1.0, -0.5, -2.0), TOLERANCE)
    assert verdict.ok
    assert verdict.mean_abs_difference == 0
    assert verdict.separation == pytest.approx(1.0)


def test_noise_passes_and_is_measured() -> None:
    # e - p = (0.1, 0.25, 0.45); <e - p, n - p> = 0.25 * 0.3 + 0.45 * 0.4 = 0.255; / 0.25 = 1.02
    verdict = verify_canary(CANARY, (10, 11, 12), (-0.9, -0.55, -1.95), TOLERANCE)
    assert verdict.ok
    assert verdict.mean_abs_difference == pytest.approx(0.2 / 3)
    assert verdict.separation == pytest.approx(1.02)


def test_the_parent_is_refused_although_it_is_close() -> None:
    # The mean difference is (0.3 + 0.4) / 3 = 0.233 here; a wider tolerance leaves the direction.
    wide = CanaryTolerance(mean_abs_max=0.5, change_min=0.2)
    verdict = verify_canary(CANARY, (10, 11, 12), CANARY.parent_logprobs, wide)
    assert not verdict.ok
    assert verdict.separation == 0
    assert verdict.reason == "it resembles the parent version (c = 0.00)"


def test_a_step_too_small_to_see_is_judged_by_distance_alone() -> None:
    canary = CANARY.model_copy(update={"parent_logprobs": (-1.0, -0.5, -2.1)})
    verdict = verify_canary(canary, (10, 11, 12), canary.parent_logprobs, TOLERANCE)
    assert verdict.ok
    assert verdict.separation is None
    assert verdict.mean_abs_difference == pytest.approx(0.1 / 3)


def test_version_0_has_no_parent_to_be_told_from() -> None:
    canary = CANARY.model_copy(update={"parent_logprobs": ()})
    assert verify_canary(canary, (10, 11, 12), canary.logprobs, TOLERANCE).separation is None


def test_another_model_is_refused_by_distance() -> None:
    verdict = verify_canary(CANARY, (10, 11, 12), (-3.0, -0.5, -2.0), TOLERANCE)
    assert not verdict.ok
    assert verdict.reason == "its log-probabilities are off by 0.6667 on average"


def test_a_near_tie_may_fall_either_way_and_ends_the_comparison() -> None:
    # Token 2 differs, and both are unlikely enough to be rivals: |-2.1 - -2.0| = 0.1.
    verdict = verify_canary(CANARY, (10, 11, 99, 5), (-1.0, -0.5, -2.1, -9.0), TOLERANCE)
    assert verdict.ok
    assert verdict.mean_abs_difference == pytest.approx(0.1 / 3)
    # Only the common prefix can have a direction: n - p = (0, 0.3), e - p = (0, 0.3).
    assert verdict.separation == pytest.approx(1.0)


def test_two_tokens_that_are_both_likelier_than_a_half_are_no_tie() -> None:
    canary = CANARY.model_copy(update={"logprobs": (-1.0, -0.3, -2.0), "parent_logprobs": ()})
    assert math.exp(-0.3) > 0.7
    verdict = verify_canary(canary, (10, 99, 12), (-1.0, -0.3, -2.0), TOLERANCE)
    assert not verdict.ok
    assert verdict.reason == "token 1 is 99 and not 11, and that is no near-tie"


def test_an_engine_that_stops_earlier_is_judged_by_what_it_gave() -> None:
    assert verify_canary(CANARY, (10,), (-1.0,), TOLERANCE).ok


@pytest.mark.parametrize("logprobs", [(), (math.nan, -0.5, -2.0)])
def test_nothing_and_not_a_number_are_refused(logprobs: tuple[float, ...]) -> None:
    assert not verify_canary(CANARY, (10, 11, 12)[: len(logprobs)], logprobs, TOLERANCE).ok


def test_every_model_type_has_a_tolerance() -> None:
    assert set(TOLERANCES) == {"bfloat16", "float32", "nf4"}
