"""Examples of a step, fetched and packed; the table of a run is fetched once."""

from collections import OrderedDict
from collections.abc import Sequence

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


class ExampleFetcher:
    """Tables of examples by their key; they never change. For one thread's use."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._tables: OrderedDict[str, ExampleTable] = OrderedDict()

    def fetch(self, key: str) -> ExampleTable:
        """The table, from memory if it is there."""
        if key not in self._tables:
            self._tables[key] = decode_examples(self._store.get(key))
        self._tables.move_to_end(key)
        while len(self._tables) > TABLES_MAX:
            self._tables.popitem(last=False)
        return self._tables[key]


def examples_of(table: ExampleTable, rows: Sequence[int]) -> list[Example]:
    """These rows as the loss needs them."""
    return [Example(ids=row.ids, is_target=row.is_target) for row in table.take(rows)]


def example_batches(
    examples: Sequence[Example], train: TrainSection, device: torch.device
) -> list[PackedTokens]:
    """The rows to forward."""
    largest = max(len(example.ids) for example in examples)
    return pack_examples(examples, token_budget(train, largest, device))
