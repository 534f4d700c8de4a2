"""Examples of a step, fetched and packed; the table of a run is fetched once."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from offbeat.algorithms.example_packing import Example, pack_examples
from offbeat.algorithms.packing import PackedTokens
from offbeat.contracts.run_spec import TrainSection
from offbeat.objects import ObjectStore
from offbeat.tables import ExampleTable, decode_examples
from services.trainer.gradient import CPU_TOKEN_BUDGET_MIN, token_budget

FULL_CPU_TOKENS = 1024
"""Forwarded at once on a CPU in full fine-tuning: to add up the gradients of a small model costs as
much as 300 tokens."""
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
    examples: Sequence[Example],
    train: TrainSection,
    device: torch.device,
    *,
    is_full: bool = False,
) -> list[PackedTokens]:
    """The rows to forward; few of them where the gradient of each is as large as the model."""
    largest = max(len(example.ids) for example in examples)
    enough = FULL_CPU_TOKENS if is_full else CPU_TOKEN_BUDGET_MIN
    return pack_examples(examples, token_budget(train, largest, device, enough))
