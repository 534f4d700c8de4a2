"""Which prompt or example comes when: each once an epoch, in a new order each epoch."""

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache

from offbeat.contracts.run_spec import RunSpec

EPOCHS_REMEMBERED = 64
"""Shuffled orders kept: neighbouring groups, of all runs that go on, share an epoch. One of a
million prompts takes 4 MB."""


def prompt_row(index: int, *, num_prompts: int, seed: int, shuffle: bool) -> int:
    """The prompt of the index-th group, or the index-th example."""
    epoch, place = divmod(index, num_prompts)
    return _epoch_order(seed, epoch, num_prompts)[place] if shuffle else place


def step_rows(spec: RunSpec, base_version: int, num_examples: int) -> tuple[int, ...]:
    """The examples of the step of a supervised run that starts from this version."""
    size, data = spec.sft.batch_size, spec.data
    return tuple(
        prompt_row(index, num_prompts=num_examples, seed=data.seed, shuffle=data.shuffle)
        for index in range(base_version * size, (base_version + 1) * size)
    )


@lru_cache(maxsize=EPOCHS_REMEMBERED)
def _epoch_order(seed: int, epoch: int, num_prompts: int) -> Sequence[int]:
    order = array("I", range(num_prompts))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
