"""A row of the data before it is rendered, and what every row must pass wherever it comes from.

A row that passes is small, plain JSON that any UTF-8 reader accepts, and its prompt has one of
TRL's two forms. Whether the prompt fits the model is for `prompts` to say.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from offbeat.errors import InvalidDataError

ROW_BYTES_MAX = 2**20
"""Of one row as JSON: a prompt of some 300,000 tokens."""
ROWS_MAX = 1_000_000
DATA_BYTES_MAX = 2**30
"""Of all rows as JSON. The rows are shuffled in memory, and each worker reads the prompts whole."""
NESTING_MAX = 32
"""Levels of lists and objects in a row: far below what makes a parser or pickle give up."""

Message = Mapping[str, JsonValue]
Prompt = str | list[Message]


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One row as its source has it, checked."""

    index: int
    """0-based place in the source."""
    place: str
    """How to find the row, for messages: `row 17`, `line 18 (row 17)`."""
    prompt: Prompt
    """Text, or a conversation as a list of messages."""
    columns: Mapping[str, JsonValue]
    """Every other column."""
    size_bytes: int
    """Of the row as JSON."""


class RowReader(Protocol):
    """Makes a row of what a source has at some place, or raises `InvalidDataError`."""

    def __call__(
        self, *, index: int, values: Mapping[str, object], prompt_field: str, place: str = ""
    ) -> SourceRow:
        """The checked row."""
        ...


def checked_row(
    *, index: int, values: Mapping[str, object], prompt_field: str, place: str = ""
) -> SourceRow:
    """The row, or `InvalidDataError` with its place and how to mend it."""
    place = place or f"row {index}"
    if prompt_field not in values:
        raise InvalidDataError(
            f"{place}: no column {prompt_field!r} (it has {', '.join(map(repr, values))}): "
            "set data.prompt_field to the column of the prompt"
        )
    size_bytes = row_bytes(place, values)
    return SourceRow(
        index=index,
        place=place,
        prompt=checked_prompt(place, prompt_field, values[prompt_field]),
        columns={name: value for name, value in values.items() if name != prompt_field},  # pyright: ignore[reportArgumentType] - `row_bytes` has seen that it is JSON
        size_bytes=size_bytes,
    )


def bounded(rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
    """The rows, until there are too many of them to hold."""
    size_bytes = 0
    for count, row in enumerate(rows, start=1):
        size_bytes += row.size_bytes
        if count > ROWS_MAX or size_bytes > DATA_BYTES_MAX:
            raise InvalidDataError(
                f"{row.place}: more than {ROWS_MAX} rows or {DATA_BYTES_MAX} bytes of data: take "
                "fewer rows or drop columns that no reward reads"
            )
        yield row


def row_bytes(place: str, values: Mapping[str, object]) -> int:
    """The size of the row as JSON. Raises `InvalidDataError` where it is none, or too long."""
    size_bytes = sum(_json_bytes(place, name, value) for name, value in values.items())
    if size_bytes > ROW_BYTES_MAX:
        raise InvalidDataError(f"{place}: {size_bytes} bytes; a row may have {ROW_BYTES_MAX}")
    return size_bytes


def _json_bytes(place: str, name: str, value: object) -> int:
    if _is_nested_deeper(value, NESTING_MAX):
        raise InvalidDataError(f"{place}: column {name!r} is nested over {NESTING_MAX} levels deep")
    try:
        return len(json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise InvalidDataError(
            f"{place}: column {name!r} holds half of a surrogate pair, which UTF-8 cannot carry: "
            "write the text as valid Unicode"
        ) from error
    except (TypeError, ValueError) as error:
        raise InvalidDataError(
            f"{place}: column {name!r} is not plain JSON ({error}): write null for a missing "
            "number and text for dates and the like, or drop the column"
        ) from error


def _is_nested_deeper(value: object, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return levels == 0 or any(_is_nested_deeper(inner, levels - 1) for inner in value)


def checked_prompt(place: str, field: str, value: object) -> Prompt:
    """Text or messages for the assistant to answer; `InvalidDataError` for anything else."""
    value = checked_content(place, field, value)
    if isinstance(value, list) and value[-1]["role"] == "assistant":
        raise InvalidDataError(
            f"{place}: {field!r} ends with the assistant's message: the answer is what the model "
            "is to write, so leave it out or move it to a column of its own"
        )
    return value


def checked_content(place: str, field: str, value: object) -> Prompt:
    """Text or messages that are not empty; `InvalidDataError` for anything else."""
    if isinstance(value, str):
        if not value.strip():
            raise InvalidDataError(f"{place}: {field!r} is empty: drop the row")
        return value
    if not isinstance(value, list):
        raise InvalidDataError(
            f"{place}: {field!r} is of type {type(value).__name__}: write text, or a list of "
            '{"role": ..., "content": ...} messages'
        )
    if not value:
        raise InvalidDataError(f"{place}: {field!r} has no messages: drop the row")
    for position, message in enumerate(value):
        _check_message(f"{place}: message {position} of {field!r}", message)
    return value


def _check_message(place: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise InvalidDataError(
            f'{place} is of type {type(message).__name__}: write {{"role": ..., "content": ...}}'
        )
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise InvalidDataError(f"{place} has no {key!r}, or one that is not text")
