"""Rows of supervised runs: their forms, what is learned of them, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from offbeat.contracts.data_sources import InlineData, ReasoningGymData
from offbeat.contracts.run_kinds import SftSection
from offbeat.data.checks import check_spec_data
from offbeat.data.gym import gym_rows
from offbeat.data.inline import inline_rows
from offbeat.data.sft_examples import Examples, build_examples
from offbeat.data.sft_rows import row_reader, sft_row
from offbeat.errors import InvalidDataError
from offbeat.models import load_tokenizer
from offbeat.tables import ExampleRow, decode_examples, encode_examples
from tests.specs import sft_spec

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
]
TAGGED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last else '...' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model, None)


def built(
    tokenizer: PreTrainedTokenizerBase,
    *rows: Mapping[str, Any],
    positions_max: int | None = None,
    data: Mapping[str, Any] = {},
    **sft: Any,
) -> Examples:
    section = InlineData(source="inline", rows=tuple(map(dict, rows)), shuffle=False, **data)
    read = inline_rows(section, sft_row)
    return build_examples(section, SftSection(**sft), read, tokenizer, positions_max)


def shown(tokenizer: PreTrainedTokenizerBase, example: ExampleRow) -> tuple[str, list[str]]:
    """The text of an example, and the runs of tokens that are learned."""
    learned: list[list[int]] = []
    before = False
    for token, is_target in zip(example.ids, example.is_target, strict=True):
        if is_target and not before:
            learned.append([])
        if is_target:
            learned[-1].append(token)
        before = is_target
    text, *turns = (cast(str, tokenizer.decode(ids)) for ids in (list(example.ids), *learned))
    return text, turns


def one(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], **sft: Any) -> list[str]:
    [example] = built(tokenizer, row, **sft).train
    text, learned = shown(tokenizer, example)
    return [text, *learned]


def test_a_prompt_is_asked_as_for_sampling_and_its_completion_is_learned(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    expected = [
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
        "2<|im_end|>\n",
    ]
    assert one(tokenizer, {"prompt": "1+1", "completion": "2"}) == expected
    messages = {"prompt": [CHAT[2]], "completion": [CHAT[3]]}
    assert one(tokenizer, messages) == expected


def test_the_system_prompt_comes_first(tokenizer: PreTrainedTokenizerBase) -> None:
    [example] = built(
        tokenizer, {"prompt": "1+1", "completion": "2"}, data={"system_prompt": "Add."}
    ).train
    text, learned = shown(tokenizer, example)
    assert text.startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1")
    assert learned == ["2<|im_end|>\n"]


def test_of_a_conversation_the_assistants_turns_are_learned(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text, *learned = one(tokenizer, {"messages": CHAT})
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learned == ["yo<|im_end|>\n", "2<|im_end|>\n"]


def test_only_the_turns_of_the_completion_are_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert one(tokenizer, row)[1:] == ["2<|im_end|>\n"]


def test_generation_tags_say_what_is_learned(tiny_model: Path) -> None:
    tagged = load_tokenizer(tiny_model, TAGGED)
    assert one(tagged, {"messages": CHAT})[1:] == ["yo<|im_end|>", "2<|im_end|>"]
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    assert one(tagged, row)[1:] == ["2<|im_end|>"]


def test_all_of_it_is_learned_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    """But for the first token, which nothing predicts."""
    text, learned = one(tokenizer, {"messages": CHAT}, completion_only_loss=False)
    assert learned == text.removeprefix("<|im_start|>")


def test_text_is_learned_as_it_is_and_ended(tokenizer: PreTrainedTokenizerBase) -> None:
    assert one(tokenizer, {"text": "abc"}) == ["abc<|im_end|>", "bc<|im_end|>"]


def test_a_tokenizer_without_a_template_takes_prompt_and_completion_as_text(
    tiny_model: Path,
) -> None:
    plain = load_tokenizer(tiny_model, None)
    plain.chat_template = None
    assert one(plain, {"prompt": "1+1=", "completion": "2"}) == ["1+1=2<|im_end|>", "2<|im_end|>"]
    with pytest.raises(InvalidDataError, match="row 0: the prompt is a conversation and the token"):
        built(plain, {"messages": CHAT})


def test_a_template_that_changes_what_it_wrote_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"row 0: the chat template writes .* \{% generat"):
        built(load_tokenizer(tiny_model, FORGETFUL), {"messages": CHAT})


def test_examples_are_cut_off_where_that_is_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"text": "abcdef"}, {"text": "ab"}
    examples = built(tokenizer, *rows, max_length=4, positions_max=256)
    assert [example.ids for example in examples.train] == [
        tuple(tokenizer("abcd").input_ids),
        (*tokenizer("ab").input_ids, tokenizer.eos_token_id),
    ]
    assert examples.num_cut == 1
    long_prompt = {"prompt": "x" * 40, "completion": "y"}
    with pytest.raises(InvalidDataError, match="row 1: no token is left to learn: drop the row"):
        built(tokenizer, rows[0], long_prompt, max_length=20)


def test_an_example_that_the_model_has_no_room_for_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with pytest.raises(InvalidDataError, match=r"row 1: the example has 11 tokens .* room for 8: "):
        built(tokenizer, {"text": "ab"}, {"text": "x" * 10}, positions_max=8)


def test_what_is_held_out_is_not_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"text": text} for text in ("a1", "a1", "b2", "c3")]
    examples = built(tokenizer, *rows, data={"eval_size": 1})
    assert [example.example_id for example in examples.eval] == ["eval-0"]
    assert [example.example_id for example in examples.train] == ["train-2", "train-3"]


def test_the_table_gives_back_its_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = built(tokenizer, {"messages": CHAT}, {"text": "abc"}).train
    table = decode_examples(encode_examples(rows))
    assert len(table) == 2
    assert table.take([1, 0, 1]) == [rows[1], rows[0], rows[1]]


def test_solutions_of_reasoning_gym_are_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    spec = sft_spec(sft={"completion_field": "answer"})
    task: dict[str, Any] = {"name": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}}
    data = ReasoningGymData.model_validate({"source": "reasoning_gym", "tasks": [task], "size": 2})
    rows = list(gym_rows(data))[:2]
    read = gym_rows(data, row_reader(spec))
    examples = build_examples(data, spec.sft, read, tokenizer, None)
    assert [shown(tokenizer, example)[1] for example in examples.train] == [
        [f"{row.columns['answer']}<|im_end|>\n"] for row in rows
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"neither 'prompt' and 'completion', nor 'messages', nor 'text' as "),
        ({"prompt": "a"}, r"\(it has 'prompt'\): set data.prompt_field and sft.completion_field"),
        ({"text": 3}, "nor 'text' as text"),
        ({"text": " "}, "'text' is empty: drop the row"),
        ({"prompt": "a", "completion": ""}, "'completion' is empty: drop the row"),
        ({"prompt": "a", "completion": None}, "'completion' is of type NoneType: write text"),
        ({"prompt": "a", "completion": [CHAT[1]]}, "must both be text or both be lists"),
        ({"messages": CHAT[:1]}, "'messages' has no message of the assistant"),
        ({"messages": []}, "'messages' has no messages"),
        ({"messages": [{"role": "user"}]}, "message 0 of 'messages' has no 'content'"),
        ({"prompt": CHAT[:2], "completion": CHAT[3:]}, "ends with the assistant's message"),
    ],
)
def test_a_wrong_row_is_refused_at_the_door_with_its_number(
    row: dict[str, Any], message: str
) -> None:
    data = InlineData(source="inline", rows=({"text": "good"}, row))
    with pytest.raises(InvalidDataError, match="row 1: .*" + message):
        check_spec_data(data, row_reader(sft_spec()))
