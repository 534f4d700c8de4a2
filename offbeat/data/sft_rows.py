"""A row of a supervised run: one of TRL's three forms, told by the columns that it has.

    {"prompt": ..., "completion": ...}   text or lists of messages; trained on the completion
    {"messages": [...]}                  a whole conversation; trained on what the assistant says
    {"text": "..."}                      trained on all of it

The columns of the first form go by `data.prompt_field` and `sft.completion_field`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from offbeat.contracts.run_spec import RunSpec
from offbeat.data.rows import (
    Prompt,
    RowReader,
    SourceRow,
    checked_content,
    checked_prompt,
    checked_row,
    row_bytes,
)
from offbeat.errors import InvalidDataError

MESSAGES, TEXT = "messages", "text"


@dataclass(frozen=True, kw_only=True)
class SftRow(SourceRow):
    """`prompt` is the whole of what is trained on where there is no completion."""

    completion: Prompt | None


def row_reader(spec: RunSpec) -> RowReader:
    """What reads the rows of this kind of run."""
    if spec.kind == "sft":
        return partial(sft_row, completion_field=spec.sft.completion_field)
    return checked_row


def sft_row(
    *,
    index: int,
    values: Mapping[str, object],
    prompt_field: str,
    completion_field: str = "completion",
    place: str = "",
) -> SftRow:
    """The row, or `InvalidDataError` with its place and how to mend it."""
    place = place or f"row {index}"
    size_bytes = row_bytes(place, values)
    completion: Prompt | None = None
    if {prompt_field, completion_field} <= values.keys():
        prompt = checked_prompt(place, prompt_field, values[prompt_field])
        completion = _completion(place, completion_field, values[completion_field])
        if type(prompt) is not type(completion):
            raise InvalidDataError(
                f"{place}: {prompt_field!r} and {completion_field!r} must both be text or both be "
                "lists of messages"
            )
    elif MESSAGES in values:
        prompt = _answered(place, MESSAGES, values[MESSAGES])
    elif isinstance(values.get(TEXT), str):
        prompt = checked_content(place, TEXT, values[TEXT])
    else:
        raise InvalidDataError(
            f"{place}: neither {prompt_field!r} and {completion_field!r}, nor {MESSAGES!r}, nor "
            f"{TEXT!r} as text (it has {', '.join(map(repr, values))}): set data.prompt_field and "
            "sft.completion_field to the columns of prompt and answer"
        )
    return SftRow(
        index=index,
        place=place,
        prompt=prompt,
        completion=completion,
        columns={},
        size_bytes=size_bytes,
    )


def _completion(place: str, field: str, value: object) -> Prompt:
    # Text may be nothing but spaces: that is an answer too.
    return value if isinstance(value, str) and value else _answered(place, field, value)


def _answered(place: str, field: str, value: object) -> Prompt:
    """Messages of which the assistant has one; text as it is."""
    content = checked_content(place, field, value)
    if isinstance(content, list) and all(one["role"] != "assistant" for one in content):
        raise InvalidDataError(
            f"{place}: {field!r} has no message of the assistant, so there is nothing to learn: "
            "drop the row"
        )
    return content
