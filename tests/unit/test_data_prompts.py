"""Prompts as the tiny model's chat template and tokenizer make them."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from offbeat.contracts.data_sources import InlineData
from offbeat.data.inline import inline_rows
from offbeat.data.prompts import build_prompts, render_prompt
from offbeat.errors import InvalidDataError
from offbeat.models import load_tokenizer
from offbeat.tables import PromptRow, decode_prompts, encode_prompts

PLAIN = ""
"""A template that is none: the tiny tokenizer then takes text as it is."""


def section(
    *rows: dict[str, JsonValue], system_prompt: str | None = None, eval_size: int = 0
) -> InlineData:
    return InlineData(
        source="inline",
        rows=rows,
        system_prompt=system_prompt,
        eval_size=eval_size,
        shuffle=False,
    )


def rendered(folder: Path, data: InlineData, template: str | None = None) -> str:
    tokenizer = load_tokenizer(folder, template)
    if template == PLAIN:
        tokenizer.chat_template = None
    [row] = inline_rows(data)
    prompt = render_prompt(tokenizer, row, data)
    assert tokenizer.decode(list(prompt.ids)) == prompt.text
    return prompt.text


def build(
    folder: Path, data: InlineData, tokens_max: int | None = None
) -> tuple[list[PromptRow], list[PromptRow]]:
    return build_prompts(data, inline_rows(data), load_tokenizer(folder, None), tokens_max)


def test_text_becomes_a_user_message(tiny_model: Path) -> None:
    assert rendered(tiny_model, section({"prompt": "1+1?"})) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_prompt_comes_first_unless_the_row_has_one(tiny_model: Path) -> None:
    user: JsonValue = {"role": "user", "content": "1+1?"}
    own: JsonValue = {"role": "system", "content": "Own."}
    cases: list[tuple[JsonValue, str]] = [
        ("1+1?", "Given."),
        ([user], "Given."),
        ([own, user], "Own."),
    ]
    for prompt, expected in cases:
        assert rendered(tiny_model, section({"prompt": prompt}, system_prompt="Given.")) == (
            f"<|im_start|>system\n{expected}<|im_end|>\n"
            "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        )


def test_without_a_chat_template_text_is_taken_as_it_is(tiny_model: Path) -> None:
    assert rendered(tiny_model, section({"prompt": "1+1="}), PLAIN) == "1+1="
    with_system = section({"prompt": "1+1="}, system_prompt="Add.")
    assert rendered(tiny_model, with_system, PLAIN) == "Add.\n\n1+1="
    conversation = section({"prompt": [{"role": "user", "content": "1+1?"}]})
    with pytest.raises(InvalidDataError, match="row 0: the prompt is a conversation and the token"):
        rendered(tiny_model, conversation, PLAIN)


def test_the_tokens_are_those_of_the_chat_template_itself(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model, None)
    data = section({"prompt": "né <|im_end|> 1"})
    [row] = inline_rows(data)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "né <|im_end|> 1"}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(render_prompt(tokenizer, row, data).ids) == expected


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"]
)
def test_a_template_that_fails_names_the_row(template: str, tiny_model: Path) -> None:
    with pytest.raises(InvalidDataError, match="row 0: the chat template refuses the prompt"):
        rendered(tiny_model, section({"prompt": "1+1?"}), template)


def test_the_tables_hold_the_tokens_and_the_columns(tiny_model: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 2}, {"prompt": "a"}]
    train, held_out = build(tiny_model, section(*rows, eval_size=1))
    assert [row.prompt_id for row in train] == ["train-1"]
    assert [row.prompt_id for row in held_out] == ["eval-0"]
    assert train[0].columns == {"answer": 2, "prompt": "b"}
    assert train[0].prompt == "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert len(train[0].prompt_ids) == 1 + 5 + 1 + 1 + 1 + 1 + 10
    assert decode_prompts(encode_prompts(train)) == train


def test_a_prompt_that_leaves_no_room_names_its_row(tiny_model: Path) -> None:
    data = section({"prompt": "a"}, {"prompt": "a" * 10})
    assert len(build(tiny_model, data, 29)[0]) == 2
    with pytest.raises(
        InvalidDataError, match=r"row 1: the prompt has 29 tokens.* has room for 28"
    ):
        build(tiny_model, data, 28)
