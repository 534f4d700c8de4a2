"""The punishment of length on numbers that can be worked out by hand."""

import pytest
import torch

from offbeat.algorithms.overlong import soft_overlong


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (20, [0, 0, -0.05, -0.5, -1, -1]),
        (100, [0, -0.8, -0.81, -0.9, -1, -1]),
        (0, [0, 0, 0, 0, 0, -1]),
    ],
)
def test_the_punishment_falls_over_the_last_tokens(cache: int, expected: list[float]) -> None:
    punishment = soft_overlong(torch.tensor([0, 80, 81, 90, 100, 101]), 100, cache)
    assert punishment.tolist() == pytest.approx(expected, abs=1e-7)
