"""Text that is shown while it is made: never changed, never half a character, no stop string."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from offbeat.models import load_tokenizer
from services.generator.text_stream import TextStream

IM_END, IM_START = 0, 1


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    """One token a byte, and two that are no text."""
    return load_tokenizer(tiny_model, None)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push([token]) for token in ids), stream.finish()]


def test_a_character_of_several_tokens_comes_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = ids_of(tokenizer, "a€b")
    assert len(ids) == 5
    assert pieces(TextStream(tokenizer, ()), ids) == ["a", "", "", "€", "b", ""]


def test_a_character_that_is_never_finished_is_shown_as_broken_at_the_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = ids_of(tokenizer, "a€")[:-1]
    assert pieces(TextStream(tokenizer, ()), ids) == ["a", "", "", "�"]


def test_bytes_that_are_no_character_are_held_back_no_longer_than_one_could_be(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    stray = ids_of(tokenizer, "€")[1]
    assert pieces(TextStream(tokenizer, ()), [stray] * 6) == ["", "", "", "�", "�", "�", "���"]


def test_tokens_that_are_no_text_are_not_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*ids_of(tokenizer, "hi"), IM_START, *ids_of(tokenizer, "!"), IM_END]
    assert "".join(pieces(TextStream(tokenizer, ()), ids)) == "hi!"


def test_a_stop_string_and_what_follows_is_not_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, ("END", "EN."))
    assert pieces(stream, ids_of(tokenizer, "xEaEND!")) == ["x", "", "Ea", "", "", "", "", ""]


def test_what_only_looks_like_the_beginning_of_a_stop_string_is_shown_in_the_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    stream = TextStream(tokenizer, ("END",))
    assert pieces(stream, ids_of(tokenizer, "xEN")) == ["x", "", "", "EN"]


def test_the_first_of_several_stop_strings_counts(tokenizer: PreTrainedTokenizerBase) -> None:
    stream = TextStream(tokenizer, ("world", "lo"))
    assert stream.push(ids_of(tokenizer, "hello world")) + stream.finish() == "hel"


@given(
    data=st.lists(st.integers(min_value=0, max_value=257), max_size=80),
    sizes=st.lists(st.integers(min_value=1, max_value=7), min_size=1, max_size=80),
    stop=st.lists(st.text(alphabet="ab\x01é", min_size=1, max_size=3), max_size=2),
)
def test_the_pieces_of_any_tokens_are_the_whole_text_up_to_the_first_stop_string(
    tokenizer: PreTrainedTokenizerBase, data: list[int], sizes: list[int], stop: list[str]
) -> None:
    stream, shown, rest = TextStream(tokenizer, stop), "", list(data)
    for size in sizes * len(data):
        shown += stream.push(rest[:size])
        rest = rest[size:]
    shown += stream.push(rest) + stream.finish()
    whole = tokenizer.decode(data, skip_special_tokens=True)
    assert isinstance(whole, str)
    places = [whole.find(text) for text in stop if text in whole]
    assert shown == whole[: min(places, default=len(whole))]
