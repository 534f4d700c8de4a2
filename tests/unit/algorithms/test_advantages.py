"""Advantages, on the vectors of the algorithms reference."""

import pytest
import torch

from offbeat.algorithms.advantages import ADVANTAGES, without_signal

NAN, INF = float("nan"), float("inf")


def advantages(name: str, rewards: list[list[float]]) -> list[list[float]]:
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64)).tolist()


def approx(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, abs=1e-6) for row in rows]


def test_the_group_mean_is_subtracted() -> None:
    assert advantages("group_mean", [[1, 0, 0, 1]]) == [[0.5, -0.5, -0.5, 0.5]]


def test_the_group_std_is_the_population_one() -> None:
    assert advantages("group_mean_std", [[1, 0, 0, 1]]) == approx([[1, -1, -1, 1]])
    expected = [2 / 3 / 0.471405, -1 / 3 / 0.471405, -1 / 3 / 0.471405, 0]
    assert advantages("group_mean_std", [[1, 0, 0, NAN]]) == [pytest.approx(expected, abs=2e-6)]


def test_the_batch_std_spans_all_groups() -> None:
    """Rewards 1 0 0 0 and 1: mean 0.4, population std 0.489898."""
    rewards = [[1, 0, 0], [0, 1, NAN]]
    expected = [[2 / 3, -1 / 3, -1 / 3], [-0.5, 0.5, 0]]
    assert advantages("batch_std", rewards) == approx([[a / 0.489898 for a in r] for r in expected])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    """1 - 1/3, 0 - 2/3; with one unscorable 1 - 0, 0 - 1/2; of two, each with the other."""
    assert advantages("leave_one_out", [[1, 0, 0, 1], [1, 0, 0, NAN], [3, 1, NAN, NAN]]) == approx(
        [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [1, -0.5, -0.5, 0], [2, -2, 0, 0]]
    )


@pytest.mark.parametrize("unscorable", [NAN, INF, -INF])
def test_s9_the_survivors_of_a_group_keep_their_own_baseline(unscorable: float) -> None:
    """One of eight is lost: the others are compared with the mean of seven, 2/7."""
    rewards = [1, 0, 0, unscorable, 0, 1, 0, 0]
    expected = [5 / 7, -2 / 7, -2 / 7, 0, -2 / 7, 5 / 7, -2 / 7, -2 / 7]
    assert advantages("group_mean", [rewards]) == approx([expected])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_without_signal_has_advantages_of_exactly_zero(name: str) -> None:
    """S8: all unscorable, one survivor, and equal rewards whose mean does not round back."""
    rewards = [[NAN, NAN, NAN], [0.7, NAN, INF], [0.1, 0.1, 0.1]]
    assert advantages(name, rewards) == [[0.0] * 3] * 3
    assert without_signal(torch.tensor(rewards)).tolist() == [True, True, True]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_step_in_which_nothing_could_be_scored_has_no_advantage(name: str) -> None:
    assert advantages(name, [[NAN, NAN]]) == [[0.0, 0.0]]
