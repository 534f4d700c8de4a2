"""The plan of the chaos suite."""

from collections import Counter

from scripts.chaos.harms import HARMS
from scripts.chaos.moments import AFTER_VERSIONS, DELAY_MAX_S, plan

HARM_NAMES = ("a", "b", "c")


def test_the_same_seed_gives_the_same_moments() -> None:
    assert plan(7, 20, HARM_NAMES) == plan(7, 20, HARM_NAMES)
    assert plan(7, 20, HARM_NAMES) != plan(8, 20, HARM_NAMES)


def test_a_shorter_plan_is_the_beginning_of_the_longer_one() -> None:
    assert plan(7, 5, HARM_NAMES) == plan(7, 9, HARM_NAMES)[:5]


def test_every_harm_comes_before_any_comes_again() -> None:
    moments = plan(7, 7, HARM_NAMES)
    assert [moment.number for moment in moments] == [1, 2, 3, 4, 5, 6, 7]
    for start in (0, 3):
        assert {moment.harm for moment in moments[start : start + 3]} == set(HARM_NAMES)


def test_every_harm_meets_both_kinds_of_run() -> None:
    met = Counter((moment.harm, moment.max_versions) for moment in plan(7, 6, HARM_NAMES))
    assert met == {(harm, bound): 1 for harm in HARM_NAMES for bound in (0, 2)}


def test_moments_lie_within_the_run() -> None:
    for moment in plan(7, 100, tuple(HARMS)):
        assert moment.after_version in AFTER_VERSIONS
        assert 0 <= moment.delay_s <= DELAY_MAX_S
