"""What every row must pass, and the words of a refusal."""

import json

import pytest
from pydantic import JsonValue

from offbeat.contracts.data_sources import InlineData
from offbeat.data.inline import inline_rows
from offbeat.data.rows import ROW_BYTES_MAX, SourceRow, bounded, checked_row
from offbeat.errors import InvalidDataError


def read(*rows: dict[str, JsonValue], prompt_field: str = "prompt") -> list[SourceRow]:
    return list(inline_rows(InlineData(source="inline", rows=rows, prompt_field=prompt_field)))


def test_the_prompt_is_parted_from_the_other_columns() -> None:
    [row] = read({"question": "1+1?", "answer": 2, "level": None}, prompt_field="question")
    assert row == SourceRow(
        index=0,
        place="row 0",
        prompt="1+1?",
        columns={"answer": 2, "level": None},
        size_bytes=len('{"question": "1+1?"}{"answer": 2}{"level": null}'),
    )


def test_a_conversation_stays_a_list_of_messages() -> None:
    messages: list[JsonValue] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
    ]
    [row] = read({"prompt": messages})
    assert row.prompt == messages


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "2"}, r"row 1: no column 'prompt' \(it has 'answer'\): set data.prompt_field"),
        ({"prompt": 3}, "row 1: 'prompt' is of type int: write text, or a list of"),
        ({"prompt": None}, "row 1: 'prompt' is of type NoneType"),
        ({"prompt": " \n"}, "row 1: 'prompt' is empty: drop the row"),
        ({"prompt": []}, "row 1: 'prompt' has no messages"),
        ({"prompt": ["hi"]}, "row 1: message 0 of 'prompt' is of type str"),
        ({"prompt": [{"content": "hi"}]}, "row 1: message 0 of 'prompt' has no 'role'"),
        ({"prompt": [{"role": "user"}]}, "row 1: message 0 of 'prompt' has no 'content'"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, "has no 'content', or one that is not"),
        ({"prompt": [{"role": "assistant", "content": "2"}]}, "ends with the assistant's message"),
        ({"prompt": "half \ud800"}, "column 'prompt' holds half of a surrogate pair"),
        ({"prompt": "hi", "answer": json.loads("1e999")}, "column 'answer' is not plain JSON"),
        ({"prompt": "hi", "a": json.loads("[" * 33 + "]" * 33)}, "column 'a' is nested over 32"),
        ({"prompt": "x" * ROW_BYTES_MAX}, "row 1: 1048590 bytes; a row may have 1048576"),
    ],
)
def test_a_wrong_row_is_named_with_its_number(row: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        checked_row(index=1, values=row, prompt_field="prompt")


def test_more_rows_than_can_be_held_are_refused_at_the_first_one_too_many() -> None:
    row = SourceRow(index=7, place="row 7", prompt="x", columns={}, size_bytes=2**29)
    taken = bounded([row, row, row])
    assert [next(taken).index, next(taken).index] == [7, 7]
    with pytest.raises(InvalidDataError, match="row 7: more than 1000000 rows or 1073741824 bytes"):
        next(taken)
