"""Which rows are held out, which are trained on, and in which order."""

import pytest

from offbeat.contracts.data_sources import InlineData
from offbeat.data.checks import check_spec_data
from offbeat.data.inline import inline_rows
from offbeat.data.split import split_rows
from offbeat.errors import InvalidDataError


def section(
    prompts: str, *, size: int | None = None, eval_size: int = 0, shuffle: bool = False
) -> InlineData:
    """One row a letter."""
    return InlineData(
        source="inline",
        rows=tuple({"prompt": letter} for letter in prompts),
        size=size,
        eval_size=eval_size,
        shuffle=shuffle,
        seed=1,
    )


def split(data: InlineData) -> tuple[list[int], list[int]]:
    """Row numbers of both tables."""
    parts = split_rows(data, inline_rows(data))
    return [row.index for row in parts.train], [row.index for row in parts.eval]


def test_evaluation_takes_the_first_different_prompts_and_training_none_of_them() -> None:
    assert split(section("aabacbd", eval_size=2)) == ([4, 6], [0, 2])


def test_size_bounds_the_training_rows_only() -> None:
    assert split(section("abcdef", eval_size=1, size=3)) == ([1, 2, 3], [0])
    assert split(section("abc", size=10)) == ([0, 1, 2], [])


def test_rows_are_shuffled_by_the_seed() -> None:
    assert split(section("abcdef", eval_size=2, shuffle=True)) == ([5, 0, 4, 1], [2, 3])


@pytest.mark.parametrize(
    ("prompts", "eval_size", "message"),
    [
        ("ab", 2, "asks for 2 different prompts.*the data has 2, and 0 other rows where 1 are"),
        ("aaa", 1, "the data has 1, and 0 other rows"),
        ("ab", 3, "the data has 2, and 0 other rows"),
    ],
)
def test_too_few_rows_are_refused_at_the_door(prompts: str, eval_size: int, message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        check_spec_data(section(prompts, eval_size=eval_size))


def test_no_rows_are_refused() -> None:
    with pytest.raises(InvalidDataError, match="the data has no rows"):
        split_rows(section("a"), [])
