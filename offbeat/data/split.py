"""Which rows are held out for evaluation and which are trained on, by seed and prompt."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.contracts.data_sources import DataBase, ReasoningGymData
from offbeat.data.gym import training_size
from offbeat.data.rows import Prompt, SourceRow
from offbeat.errors import InvalidDataError


@dataclass(frozen=True, kw_only=True)
class Split:
    """The rows of both tables, in the order in which they are used."""

    train: list[SourceRow]
    eval: list[SourceRow]


def split_rows(section: DataBase, rows: Iterable[SourceRow]) -> Split:
    """Hold out the first `eval_size` different prompts, then take up to `size` others to train on.

    A prompt that is held out is never trained on, however often it occurs. reasoning-gym's rows
    come in random order already, so they are taken as they come; all others are shuffled.
    """
    is_drawn = isinstance(section, ReasoningGymData)
    size = training_size(section) if is_drawn else section.size
    held_out: dict[str, SourceRow] = {}
    train: list[SourceRow] = []
    for row in rows if is_drawn or not section.shuffle else _shuffled(rows, section.seed):
        if len(held_out) < section.eval_size:
            held_out.setdefault(_identity(row.prompt), row)
        elif _identity(row.prompt) not in held_out:
            train.append(row)
        if len(train) == size:
            break
    split = Split(train=train, eval=list(held_out.values()))
    _check_sizes(split, section.eval_size, training_size(section) if is_drawn else 1)
    return split


def _check_sizes(split: Split, eval_size: int, train_min: int) -> None:
    if not split.train and not split.eval:
        raise InvalidDataError("the data has no rows: give it at least one")
    if len(split.eval) < eval_size or len(split.train) < train_min:
        raise InvalidDataError(
            f"data.eval_size asks for {eval_size} different prompts that are never trained on: the "
            f"data has {len(split.eval)}, and {len(split.train)} other rows where {train_min} are "
            "needed to train on; lower data.eval_size, or give more different prompts"
        )


def _shuffled(rows: Iterable[SourceRow], seed: int) -> list[SourceRow]:
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def _identity(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
