"""From rows to prompts as the model sees them: rendered by the chat template, tokenised once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from offbeat.contracts.data_sources import DataBase
from offbeat.data.rows import Message, SourceRow
from offbeat.data.split import split_rows
from offbeat.errors import InvalidDataError
from offbeat.tables import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a template may raise: Jinja's own errors and those of the expressions in it."""


@dataclass(frozen=True, kw_only=True)
class RenderedPrompt:
    """The text of a prompt and its tokens."""

    text: str
    ids: tuple[int, ...]


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase", row: SourceRow, section: DataBase
) -> RenderedPrompt:
    """The prompt as a chat that waits for the assistant.

    Text becomes one user message. The section's system prompt comes first, unless the row's
    conversation has one. A tokenizer without a chat template takes text as it is.
    """
    if tokenizer.chat_template is None:
        text = _plain_text(row, section.system_prompt)
        return RenderedPrompt(text=text, ids=tuple(tokenizer(text, verbose=False).input_ids))
    messages = conversation(row, section.system_prompt)
    with explained(row.place):
        text = render_chat(tokenizer, messages, add_generation_prompt=True)
    return RenderedPrompt(text=text, ids=rendered_ids(tokenizer, text))


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text of a chat; with `add_generation_prompt` it is the assistant's turn at the end."""
    rendered = tokenizer.apply_chat_template(
        cast(list[dict[str, str]], messages),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    return cast(str, rendered)


def rendered_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    """The tokens of a text that a chat template wrote, special tokens included.

    `apply_chat_template` itself goes on like this.
    """
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


@contextmanager
def explained(place: str) -> Iterator[None]:
    """Turn what a chat template raises into an `InvalidDataError` about the row."""
    try:
        yield
    except TEMPLATE_ERRORS as error:
        raise InvalidDataError(
            f"{place}: the chat template refuses the prompt ({error}): mend the row, or set "
            "model.chat_template"
        ) from error


def build_prompts(
    section: DataBase,
    rows: Iterable[SourceRow],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int | None,
    on_row: Callable[[], None] = lambda: None,
) -> tuple[list[PromptRow], list[PromptRow]]:
    """The training prompts and the held-out ones.

    `on_row` is called once for each row that is read and once for each that is rendered. Raises
    `InvalidDataError` with the place of the first wrong row.
    """
    split = split_rows(section, announced(rows, on_row))

    def built(name: str, chosen: list[SourceRow]) -> list[PromptRow]:
        return [
            _prompt_row(name, row, render_prompt(tokenizer, row, section), max_prompt_tokens)
            for row in announced(chosen, on_row)
        ]

    return built("train", split.train), built("eval", split.eval)


def announced(rows: Iterable[SourceRow], on_row: Callable[[], None]) -> Iterator[SourceRow]:
    """The rows, each one told to `on_row` before it is taken."""
    for row in rows:
        on_row()
        yield row


def _prompt_row(
    split: str, row: SourceRow, rendered: RenderedPrompt, tokens_max: int | None
) -> PromptRow:
    if not rendered.ids:
        raise InvalidDataError(f"{row.place}: the prompt has no tokens: drop the row")
    if tokens_max is not None and len(rendered.ids) > tokens_max:
        raise InvalidDataError(
            f"{row.place}: the prompt has {len(rendered.ids)} tokens and the model has room for "
            f"{tokens_max} beside rollout.max_new_tokens: shorten or drop it, or lower "
            "rollout.max_new_tokens"
        )
    return PromptRow(
        prompt_id=f"{split}-{row.index}",
        prompt=rendered.text,
        prompt_ids=rendered.ids,
        columns={**row.columns, "prompt": row.prompt},  # pyright: ignore[reportArgumentType] - a message list is JSON
    )


def _plain_text(row: SourceRow, system_prompt: str | None) -> str:
    if not isinstance(row.prompt, str):
        raise InvalidDataError(
            f"{row.place}: the prompt is a conversation and the tokenizer has no chat template: "
            "set model.chat_template, or write prompts as text"
        )
    return f"{system_prompt}\n\n{row.prompt}" if system_prompt else row.prompt


def conversation(row: SourceRow, system_prompt: str | None) -> Sequence[Message]:
    """The prompt as messages, below the system prompt unless it has one of its own."""
    prompt = row.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]
