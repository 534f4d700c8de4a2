"""That the check of the packing sees what it is there for."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.example_packing import Example, pack_examples
from offbeat.algorithms.packing import PackedBatch, PackedTokens, Row
from offbeat.contracts.run_spec import LoraSection, ModelSection
from services.trainer.faithful import (
    PACKING_ERROR_MAX,
    packing_error,
    shape_class,
    smallest_batch,
    unscored,
)
from services.trainer.policy import Policy


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    model = ModelSection(id="tiny", dtype="float32")
    return Policy.load(tiny_model, model, LoraSection(rank=2), torch.device("cpu"))


def batch(*rows: tuple[int, tuple[int, ...]]) -> PackedBatch:
    """Rows by the length of the prompt and of each completion."""
    return PackedBatch.of_rows(
        [
            Row(
                prompt_ids=tuple(range(10, 10 + prompt)),
                completions=tuple(
                    unscored(tuple(range(30 + place, 30 + place + length)))
                    for place, length in enumerate(lengths)
                ),
            )
            for prompt, lengths in rows
        ]
    )


SHAPES = [
    batch((1, (1,))),
    batch((1, (1, 1, 1))),
    batch((5, (3, 40, 2))),
    batch((2, (4, 4)), (7, (1, 2, 3, 9)), (1, (1,))),
]


[EXAMPLES] = pack_examples(
    [
        Example(ids=tuple(range(place, place + 6)), is_target=(False, *[True] * 5))
        for place in (10, 30, 50)
    ],
    64,
)


@pytest.mark.parametrize("shape", [*SHAPES, EXAMPLES])
def test_t23_packing_is_exact_up_to_rounding(policy: Policy, shape: PackedTokens) -> None:
    assert packing_error(policy, shape) < 1e-5


@dataclass
class Leaky:
    """A policy in which every completion of a row sees those before it."""

    policy: Policy

    def distributions(self, batch: PackedTokens) -> Tensor:
        return self.policy.distributions(replace(batch, segments_BT=batch.segments_BT.clamp(max=1)))

    def plain_distributions(self, ids: tuple[int, ...], num_last: int) -> Tensor:
        return self.policy.plain_distributions(ids, num_last)


@pytest.mark.parametrize("shape", [smallest_batch(), *SHAPES[2:], EXAMPLES])
def test_a_leak_between_completions_is_seen(policy: Policy, shape: PackedTokens) -> None:
    assert packing_error(Leaky(policy), shape) > PACKING_ERROR_MAX


def test_shapes_belong_to_the_class_of_the_next_power_of_two() -> None:
    assert [shape_class(shape) for shape in SHAPES] == [(0, 1), (0, 2), (0, 6), (2, 5)]
