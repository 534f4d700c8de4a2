"""One entry of a reasoning-gym task on its way through the prompt table, and its score.

A task scores by its entry as Python made it, and JSON would turn its tuples into lists and its
number keys into text. So the entry travels as a Python literal in the column `entry`, beside
`answer` and `metadata`, which are there for people and for other rewards.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

ENTRY_COLUMN = "entry"


@dataclass(frozen=True, kw_only=True)
class GymEntry:
    """One entry of a task, and the settings of the task that made it."""

    task: str
    config: Mapping[str, JsonValue]
    entry: dict[str, Any]
    """`question`, `answer` and `metadata`, as reasoning-gym made them."""

    def to_literal(self) -> str:
        """As a Python literal, which keeps tuples and number keys."""
        return repr((self.task, _plain(self.config), _plain(self.entry)))

    @classmethod
    def from_literal(cls, literal: str) -> "GymEntry":
        """What `to_literal` wrote; ValueError for anything else."""
        try:
            task, config, entry = ast.literal_eval(literal)
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"not an entry of reasoning-gym: {error}") from error
        return cls(task=task, config=config, entry=entry)

    def score(self, answer: str | None) -> float:
        """reasoning-gym's own score, in [0, 1]."""
        return _scoring_dataset(self.task, repr(self.config)).score_answer(answer, self.entry)


@lru_cache(maxsize=64)  # as many as a mixture may have
def _scoring_dataset(task: str, config: str) -> "ProceduralDataset":
    import reasoning_gym

    return reasoning_gym.create_dataset(task, **ast.literal_eval(config))


def _plain(value: object) -> object:
    """The same value in Python's own types: some tasks hold numpy's subclasses of str."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(inner) for inner in value)
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value
