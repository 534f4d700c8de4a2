"""Rows of whole examples that do not see one another, and batches of such rows.

    ids        a a a a | b b b        segments   1 1 1 1 | 2 2 2
    positions  0 1 2 3 | 0 1 2        (padding at the end is segment -1)

A target is predicted by the token before it in its own example, so the first token is never one.
Examples of like length share a row: the room that attention gives each is that of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.algorithms.packing import PADDING, ROW_TOKENS_MAX, PackedTokens, padded, side_by_side


@dataclass(frozen=True, kw_only=True)
class Example:
    """Tokens, and which of them are targets."""

    ids: tuple[int, ...]
    is_target: tuple[bool, ...]


def pack_examples(examples: Sequence[Example], token_budget: int) -> list[PackedTokens]:
    """Fill rows and put them side by side, at most `token_budget` tokens a batch.

    An example longer than the budget is a batch of its own.
    """
    rows = _filled(examples, min(token_budget, ROW_TOKENS_MAX))
    batches = side_by_side(rows, _num_tokens, token_budget)
    return [_laid_out(batch) for batch in batches]


def _filled(examples: Sequence[Example], tokens_max: int) -> list[list[Example]]:
    rows: list[list[Example]] = []
    room = 0
    for example in sorted(examples, key=lambda example: len(example.ids), reverse=True):
        if len(example.ids) > room:
            rows.append([])
            room = tokens_max
        rows[-1].append(example)
        room -= len(example.ids)
    return rows


def _laid_out(rows: Sequence[Sequence[Example]]) -> PackedTokens:
    width = max(_num_tokens(row) for row in rows)
    predictors: list[int] = []
    targets: list[int] = []
    for place, row in enumerate(rows):
        start = place * width
        for example in row:
            chosen = [at for at, is_target in enumerate(example.is_target) if is_target]
            predictors += [start + at - 1 for at in chosen]
            targets += [example.ids[at] for at in chosen]
            start += len(example.ids)
    ids = [[token for example in row for token in example.ids] for row in rows]
    positions = [[at for example in row for at in range(len(example.ids))] for row in rows]
    segments = [
        [segment for segment, example in enumerate(row, start=1) for _ in example.ids]
        for row in rows
    ]
    return PackedTokens(
        ids_BT=padded(ids, width, 0),
        positions_BT=padded(positions, width, 0),
        segments_BT=padded(segments, width, PADDING),
        predictors_N=torch.tensor(predictors),
        targets_N=torch.tensor(targets),
    )


def _num_tokens(row: Sequence[Example]) -> int:
    return sum(len(example.ids) for example in row)
