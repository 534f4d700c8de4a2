"""Which prompt or example comes when: each once an epoch, in a new order each epoch."""

import random
from functools import lru_cache

from offbeat.contracts.run_spec import RunSpec

EPOCHS_REMEMBERED = 8
"""Shuffled orders kept: neighbouring groups, of a few runs, share an epoch."""


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
def _epoch_order(seed: int, epoch: int, num_prompts: int) -> tuple[int, ...]:
    order = list(range(num_prompts))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
