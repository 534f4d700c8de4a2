"""From rows to the examples of a supervised run: token ids, and which of them are learned.

The prompt is rendered and tokenised exactly as for sampling, so that what is learned is what a
generator is asked for later. Where the answers are in a conversation is told by the chat template:
by its `{% generation %}` tags where it has them, else by rendering the conversation up to each
answer and through it; a template that changes what it wrote before is refused with the row.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from offbeat.contracts.data_sources import DataBase
from offbeat.contracts.run_kinds import SftSection
from offbeat.data.prompts import (
    announced,
    conversation,
    explained,
    render_chat,
    render_prompt,
    rendered_ids,
)
from offbeat.data.rows import Message, SourceRow
from offbeat.data.sft_rows import SftRow
from offbeat.data.split import split_rows
from offbeat.errors import InvalidDataError
from offbeat.tables import ExampleRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Both tables of a run."""

    train: list[ExampleRow]
    eval: list[ExampleRow]
    num_cut: int
    """Examples that `sft.max_length` has cut off."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A piece of an example; all of its tokens are learned, or none."""

    ids: tuple[int, ...]
    is_target: bool


def build_examples(
    section: DataBase,
    sft: SftSection,
    rows: Iterable[SourceRow],
    tokenizer: "PreTrainedTokenizerBase",
    positions_max: int | None,
    on_row: Callable[[], None] = lambda: None,
) -> Examples:
    """The examples of rows that `sft_row` has read.

    `on_row` is called once for each row that is read and once for each that is rendered. Raises
    `InvalidDataError` with the place of the first wrong row.
    """
    split = split_rows(section, announced(rows, on_row))
    cut = 0
    made: dict[str, list[ExampleRow]] = {"train": [], "eval": []}
    for name, chosen in (("train", split.train), ("eval", split.eval)):
        for row in announced(chosen, on_row):
            assert isinstance(row, SftRow), "the rows are read by `sft_row`"
            pieces = render_example(tokenizer, row, section, sft)
            ids = tuple(token for piece in pieces for token in piece.ids)
            # The first token has nothing before it that could predict it.
            is_target = (False, *[piece.is_target for piece in pieces for _ in piece.ids][1:])
            _check_length(row, len(ids), sft, positions_max)
            if not any(is_target[: sft.max_length]):
                raise InvalidDataError(f"{row.place}: no token is left to learn: drop the row")
            cut += sft.max_length is not None and len(ids) > sft.max_length
            made[name].append(
                ExampleRow(
                    example_id=f"{name}-{row.index}",
                    ids=ids[: sft.max_length],
                    is_target=is_target[: sft.max_length],
                )
            )
    return Examples(train=made["train"], eval=made["eval"], num_cut=cut)


def render_example(
    tokenizer: "PreTrainedTokenizerBase", row: SftRow, section: DataBase, sft: SftSection
) -> list[Tokens]:
    """The example in pieces. A text stands for itself; all else is a chat where the tokenizer has a
    template for it."""
    if row.completion is None and isinstance(row.prompt, str):
        ids = tuple(tokenizer(row.prompt, verbose=False).input_ids)
        return [Tokens(ids=_ended(tokenizer, ids), is_target=True)]
    if tokenizer.chat_template is None:
        pieces = _plain_pieces(tokenizer, row, section)
    else:
        with explained(row.place):
            pieces = _chat_pieces(tokenizer, row, section)
    if sft.completion_only_loss:
        return pieces
    return [Tokens(ids=piece.ids, is_target=True) for piece in pieces]


def _plain_pieces(
    tokenizer: "PreTrainedTokenizerBase", row: SftRow, section: DataBase
) -> list[Tokens]:
    prompt_ids = render_prompt(tokenizer, row, section).ids
    assert isinstance(row.completion, str), "a prompt that is text has a completion that is text"
    completion_ids = rendered_ids(tokenizer, row.completion)
    return [
        Tokens(ids=prompt_ids, is_target=False),
        Tokens(ids=_ended(tokenizer, completion_ids), is_target=True),
    ]


def _chat_pieces(
    tokenizer: "PreTrainedTokenizerBase", row: SftRow, section: DataBase
) -> list[Tokens]:
    asked = conversation(row, section.system_prompt)
    if row.completion is None:
        messages, first = asked, 0
    else:
        answered = row.completion
        if isinstance(answered, str):
            answered = [{"role": "assistant", "content": answered}]
        messages, first = [*asked, *answered], len(asked)
    template = tokenizer.get_chat_template()
    cut = _by_tags if GENERATION_TAG.search(template) else _by_turns
    return cut(tokenizer, row.place, messages, first)


def _by_tags(
    tokenizer: "PreTrainedTokenizerBase", place: str, messages: Sequence[Message], first: int
) -> list[Tokens]:
    """As the template marks its own output; nothing before the first message that is learned."""
    encoded = tokenizer.apply_chat_template(
        cast(list[dict[str, str]], messages),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids = cast(dict[str, list[int]], encoded)["input_ids"]
    marks = cast(dict[str, list[int]], encoded)["assistant_masks"]
    num_asked = 0
    if first:
        text = render_chat(tokenizer, messages[:first], add_generation_prompt=True)
        asked_ids = rendered_ids(tokenizer, text)
        num_asked = len(asked_ids)
        if tuple(ids[:num_asked]) != asked_ids:
            raise _changed(place)
    return [
        Tokens(ids=(token,), is_target=bool(mark) and at >= num_asked)
        for at, (token, mark) in enumerate(zip(ids, marks, strict=True))
    ]


def _by_turns(
    tokenizer: "PreTrainedTokenizerBase", place: str, messages: Sequence[Message], first: int
) -> list[Tokens]:
    """An answer is what the template adds to the conversation before it, end of turn included."""
    pieces: list[Tokens] = []
    whole = render_chat(tokenizer, messages, add_generation_prompt=False)
    written = ""
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or at < first:
            continue
        asked = render_chat(tokenizer, messages[:at], add_generation_prompt=True)
        is_last = at + 1 == len(messages)
        answered = (
            whole
            if is_last
            else render_chat(tokenizer, messages[: at + 1], add_generation_prompt=False)
        )
        if not (
            asked.startswith(written) and answered.startswith(asked) and whole.startswith(answered)
        ):
            raise _changed(place)
        for text, is_target in ((asked[len(written) :], False), (answered[len(asked) :], True)):
            pieces.append(Tokens(ids=rendered_ids(tokenizer, text), is_target=is_target))
        written = answered
    rest = rendered_ids(tokenizer, whole[len(written) :])
    return [*pieces, Tokens(ids=rest, is_target=False)]


def _changed(place: str) -> InvalidDataError:
    return InvalidDataError(
        f"{place}: the chat template writes a conversation otherwise once it is answered, so it "
        "does not show where the answers are: mark them with {% generation %} in "
        "model.chat_template"
    )


def _ended(tokenizer: "PreTrainedTokenizerBase", ids: tuple[int, ...]) -> tuple[int, ...]:
    """With the token that ends a text, where the tokenizer has one."""
    end = cast(int | None, tokenizer.eos_token_id)
    return ids if end is None or ids[-1:] == (end,) else (*ids, end)


def _check_length(
    row: SourceRow, num_tokens: int, sft: SftSection, positions_max: int | None
) -> None:
    if sft.max_length is None and positions_max is not None and num_tokens > positions_max:
        raise InvalidDataError(
            f"{row.place}: the example has {num_tokens} tokens and the model room for "
            f"{positions_max}: shorten or drop it, or set sft.max_length to cut examples off"
        )
