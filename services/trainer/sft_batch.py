"""Examples of a step, fetched and packed; the table of a run is fetched once."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from offbeat.algorithms.example_packing import Example, pack_examples
from offbeat.algorithms.packing import PackedTokens
from offbeat.contracts.run_spec import TrainSection
from offbeat.objects import ObjectStore
from offbeat.tables import ExampleTable, decode_examples
from services.trainer.gradient import token_budget

TABLES_MAX = 4
"""Tables held at once: both of each of two runs that take turns. They are compact, at most about a
gigabyte each."""


def example_tables(store: ObjectStore) -> Callable[[str], ExampleTable]:
    """Tables of examples by their key, remembered: they never change."""

    @lru_cache(TABLES_MAX)
    def fetch(key: str) -> ExampleTable:
        return decode_examples(store.get(key))

    return fetch


def examples_of(table: ExampleTable, rows: Sequence[int]) -> list[Example]:
    """These rows as the loss needs them."""
    return [Example(ids=row.ids, is_target=row.is_target) for row in table.take(rows)]


def example_batches(
    examples: Sequence[Example], train: TrainSection, device: torch.device
) -> list[PackedTokens]:
    """The rows to forward."""
    largest = max(len(example.ids) for example in examples)
    return pack_examples(examples, token_budget(train, largest, device))
