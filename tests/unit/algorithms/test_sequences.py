"""Sums by sequence, in whatever order the tokens come."""

import torch

from offbeat.algorithms.sequences import sequence_average, sequence_sum

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
SAMPLES = torch.tensor([900, 2, 900, 2, 2])


def test_every_token_gets_the_sum_and_the_mean_of_its_sequence() -> None:
    assert sequence_sum(VALUES, SAMPLES).tolist() == [5, 26, 5, 26, 26]
    assert sequence_average(VALUES, SAMPLES).tolist() == [
        2.5,
        VALUES[[1, 3, 4]].mean().item(),
        2.5,
        VALUES[[1, 3, 4]].mean().item(),
        VALUES[[1, 3, 4]].mean().item(),
    ]


def test_no_tokens_give_no_sums() -> None:
    empty = torch.empty(0)
    assert sequence_average(empty, torch.empty(0, dtype=torch.int64)).tolist() == []
