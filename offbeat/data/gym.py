"""Rows that reasoning-gym makes: any mixture of its tasks, the same for the same seed.

A few tasks walk over sets of strings: their rows are the same in another process only where
PYTHONHASHSEED is.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING

from offbeat.contracts.data_sources import GymTask, ReasoningGymData
from offbeat.data.gym_entry import ENTRY_COLUMN, GymEntry
from offbeat.data.rows import RowReader, SourceRow, checked_row
from offbeat.errors import InvalidDataError, PermanentJobError
from offbeat.spec_problems import nearest

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

SIZE_DEFAULT = 1000
"""Training rows where the section gives no size: the source itself has no end."""
ROUNDS_MAX = 20
"""Times the wanted number of rows is drawn, in case most are held out for evaluation."""


def training_size(section: ReasoningGymData) -> int:
    """The number of training rows to draw."""
    return section.size or SIZE_DEFAULT


def gym_rows(section: ReasoningGymData, read: RowReader = checked_row) -> Iterator[SourceRow]:
    """Rows of the mixture, lazily: up to `ROUNDS_MAX` times as many as the section asks for."""
    if not is_installed():
        raise PermanentJobError(
            "reasoning-gym is not installed on this worker: pip install 'offbeat[worker]'"
        )
    check_tasks(section.tasks)
    weights = [task.weight for task in section.tasks]
    choices = random.Random(f"{section.seed} mixture")
    round_size = training_size(section) + section.eval_size
    for number in range(ROUNDS_MAX):
        round_tasks = [
            _RoundTask.create(task, f"{section.seed} {position} {number}", round_size)
            for position, task in enumerate(section.tasks)
        ]
        for position in range(round_size):
            task = choices.choices(round_tasks, weights)[0]
            yield _row(number * round_size + position, task, task.entry(position), read)


def check_tasks(tasks: Sequence[GymTask]) -> None:
    """Raise `InvalidDataError` for a task or a setting that reasoning-gym does not have."""
    from reasoning_gym.factory import DATASETS

    known = DATASETS.keys() - {"composite"}
    for position, task in enumerate(tasks):
        place = f"data.tasks[{position}]"
        if task.name not in known:
            raise InvalidDataError(
                f"{place}: reasoning-gym has no task {task.name!r}{_hint(task.name, known)}"
            )
        settings = {field.name for field in fields(DATASETS[task.name][1])} - {"seed", "size"}
        for name in task.config:
            if name in ("seed", "size"):
                raise InvalidDataError(f"{place}.config.{name}: set data.{name} instead")
            if name not in settings:
                raise InvalidDataError(
                    f"{place}.config.{name}: {task.name} has no such setting{_hint(name, settings)}"
                )


def is_installed() -> bool:
    """Whether this process can make and score tasks."""
    return find_spec("reasoning_gym") is not None


@dataclass(frozen=True, kw_only=True)
class _RoundTask:
    """A task with the seed of one round."""

    task: GymTask
    seed: str
    dataset: "ProceduralDataset"

    @classmethod
    def create(cls, task: GymTask, seed: str, size: int) -> "_RoundTask":
        # Half of 32 bits: some tasks seed numpy with `seed + index`.
        number = random.Random(seed).randrange(2**31)
        return cls(task=task, seed=seed, dataset=_create(task, seed=number, size=size))

    def entry(self, position: int) -> GymEntry:
        """The entry at this place, also where the task draws from the global stream."""
        with _global_stream(f"{self.seed} {position}"), _explained(self.task):
            entry = self.dataset[position]
        return GymEntry(task=self.task.name, config=self.task.config, entry=entry)


def _row(index: int, task: _RoundTask, made: GymEntry, read: RowReader) -> SourceRow:
    values = {
        "prompt": made.entry["question"],
        "answer": made.entry["answer"],
        "metadata": made.entry["metadata"],
        ENTRY_COLUMN: made.to_literal(),
    }
    place = f"row {index} ({task.task.name})"
    return read(index=index, place=place, values=values, prompt_field="prompt")


def _create(task: GymTask, *, seed: int, size: int) -> "ProceduralDataset":
    import reasoning_gym

    with _explained(task):
        return reasoning_gym.create_dataset(task.name, **task.config, seed=seed, size=size)


@contextmanager
def _explained(task: GymTask) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InvalidDataError(
            f"reasoning-gym cannot make {task.name} with the settings {task.config}: {error!r}"
        ) from error


@contextmanager
def _global_stream(seed: str) -> Iterator[None]:
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _hint(name: str, known: set[str]) -> str:
    near = nearest(name, sorted(known))
    return f"; did you mean {near!r}?" if near else f"; known: {', '.join(sorted(known))}"
