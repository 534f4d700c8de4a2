"""Rows that share the work on a prompt among its completions, and batches of such rows.

A row is a prompt once, followed by completions of it. Every completion sees the prompt and itself,
so it is computed exactly as if it stood alone:

    ids        p p p | a a a a | b b        segments   0 0 0 | 1 1 1 1 | 2 2
    positions  0 1 2 | 3 4 5 6 | 3 4        (padding at the end is segment -1)

The last prompt token predicts the first token of every completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

ROW_TOKENS_MAX = 2048
"""The mask is dense: in longer rows attention costs more than sharing the prompt saves."""
PADDING = -1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample as the loss needs it."""

    sample: int
    """Its index among all samples of the step."""
    ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    advantage: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and completions of it: a whole group, or a part of one."""

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens to forward."""
        return len(self.prompt_ids) + sum(len(one.ids) for one in self.completions)


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Rows side by side, padded to the longest; the targets of all rows in one list."""

    ids_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    predictors_N: Tensor
    """Index into the flattened B x T of the position that predicts each target."""
    targets_N: Tensor

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in vars(self).items()})

    def allowed_B1TT(self) -> Tensor:
        """True where a query (third axis) may see a key (fourth axis)."""
        query_BT1, key_B1T = self.segments_BT[:, :, None], self.segments_BT[:, None, :]
        visible_BTT = (query_BT1 == key_B1T) | (key_B1T == 0)
        return visible_BTT.tril()[:, None]


@dataclass(frozen=True, kw_only=True)
class PackedBatch(PackedTokens):
    """Groups, with every token of their completions a target."""

    samples_N: Tensor
    advantages_N: Tensor
    behaviour_logprobs_N: Tensor

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Self:
        """Lay the rows out."""
        width = max(row.num_tokens for row in rows)
        completions = [one for row in rows for one in row.completions]
        lengths_S = torch.tensor([len(one.ids) for one in completions])
        samples_S = torch.tensor([one.sample for one in completions])
        advantages_S = torch.tensor([one.advantage for one in completions])
        return cls(
            ids_BT=padded([_ids(row) for row in rows], width, 0),
            positions_BT=padded([_positions(row) for row in rows], width, 0),
            segments_BT=padded([_segments(row) for row in rows], width, PADDING),
            predictors_N=torch.tensor(
                [place * width + at for place, row in enumerate(rows) for at in _predictors(row)]
            ),
            targets_N=torch.tensor([token for one in completions for token in one.ids]),
            samples_N=samples_S.repeat_interleave(lengths_S),
            advantages_N=advantages_S.repeat_interleave(lengths_S),
            behaviour_logprobs_N=torch.tensor(
                [logprob for one in completions for logprob in one.behaviour_logprobs]
            ),
        )


def with_signal(groups: Sequence[Row]) -> list[Row]:
    """Without the completions whose advantage is zero, and without groups that have no other.

    Exact while the loss has no other term than the advantage's: they add nothing to the gradient,
    and the sequence weights were computed with them.
    """
    kept = [
        replace(group, completions=tuple(one for one in group.completions if one.advantage))
        for group in groups
    ]
    return [group for group in kept if group.completions]


def pack(groups: Sequence[Row], token_budget: int) -> list[PackedBatch]:
    """Split groups into rows and rows into batches of at most `token_budget` tokens each.

    A single prompt and completion longer than the budget is a batch of its own.
    """
    row_tokens_max = min(token_budget, ROW_TOKENS_MAX)
    rows = [row for group in groups for row in _split(group, row_tokens_max)]
    batches = side_by_side(rows, lambda row: row.num_tokens, token_budget)
    return [PackedBatch.of_rows(batch) for batch in batches]


def side_by_side(
    rows: Sequence[T], num_tokens: Callable[[T], int], token_budget: int
) -> list[list[T]]:
    """The rows in batches, the longest first, so that padding is short: each has at most
    `token_budget` tokens, padding included, or a single row."""
    batches: list[list[T]] = []
    for row in sorted(rows, key=num_tokens, reverse=True):
        if batches and (len(batches[-1]) + 1) * num_tokens(batches[-1][0]) <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _split(group: Row, tokens_max: int) -> list[Row]:
    rows: list[Row] = []
    for completion in group.completions:
        if rows and rows[-1].num_tokens + len(completion.ids) <= tokens_max:
            rows[-1] = replace(rows[-1], completions=(*rows[-1].completions, completion))
        else:
            rows.append(replace(group, completions=(completion,)))
    return rows


def _ids(row: Row) -> list[int]:
    return [*row.prompt_ids, *(token for one in row.completions for token in one.ids)]


def _positions(row: Row) -> list[int]:
    prompt = len(row.prompt_ids)
    restarted = (range(prompt, prompt + len(one.ids)) for one in row.completions)
    return [*range(prompt), *(position for positions in restarted for position in positions)]


def _segments(row: Row) -> list[int]:
    segments = [0] * len(row.prompt_ids)
    for segment, one in enumerate(row.completions, start=1):
        segments += [segment] * len(one.ids)
    return segments


def _predictors(row: Row) -> list[int]:
    last = len(row.prompt_ids) - 1
    predictors: list[int] = []
    start = len(row.prompt_ids)
    for one in row.completions:
        predictors += [last, *range(start, start + len(one.ids) - 1)]
        start += len(one.ids)
    return predictors


def padded(rows: Sequence[list[int]], width: int, filler: int) -> Tensor:
    """(B, T) The rows, each filled up to the width."""
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
