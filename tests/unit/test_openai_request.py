"""What a chat request may ask for."""

from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.contracts.chat import CHAT_CHARS_MAX, CHAT_TOKENS_MAX, ChatInput, ChatMessage
from services.orchestrator.openai_request import ChatRequest, split_model

USER = {"role": "user", "content": "hello"}


def request(**changes: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "run-1", "messages": [USER], **changes})


def test_the_defaults_are_openais() -> None:
    question = request(seed=5).question()
    assert question == ChatInput(
        messages=(ChatMessage(role="user", content="hello"),),
        version=None,
        max_tokens=None,
        temperature=1.0,
        top_p=1.0,
        stop=(),
        seed=5,
    )
    assert request().question().seed != request().question().seed


def test_everything_that_is_supported_reaches_the_question() -> None:
    question = request(
        model="run-1@12",
        temperature=0,
        top_p=0.5,
        max_tokens=9,
        max_completion_tokens=7,
        stop="x",
        seed=-1,
    ).question()
    assert question.version == 12
    assert (question.temperature, question.top_p) == (0.0, 0.5)
    assert question.max_tokens == 7
    assert question.stop == ("x",)
    assert question.seed == 2**63 - 1


def test_parts_are_joined_and_an_answer_may_come_back_as_it_was() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []}
    developer = {"role": "developer", "content": parts, "name": "me"}
    assert request(messages=[developer, answer, USER]).question().messages == (
        ChatMessage(role="system", content="ab"),
        ChatMessage(role="assistant", content="c"),
        ChatMessage(role="user", content="hello"),
    )


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"tools": [], "tool_choice": "none"},
        {"presence_penalty": 0.0, "frequency_penalty": 0},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "logit_bias": {}},
        {"user": "somebody", "metadata": {"a": "b"}, "store": True},
        {"reasoning_effort": None, "anything": None},
    ],
)
def test_what_changes_no_answer_is_taken(neutral: dict[str, Any]) -> None:
    assert request(seed=1, **neutral).question() == request(seed=1).question()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n": 2}, "a request has one answer"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"top_k": 5}, "top_k is not supported"),
        ({"temperature": 2.1}, "less than or equal to 2"),
        ({"temperature": float("nan")}, "finite number"),
        ({"top_p": 0}, "greater than 0"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"max_tokens": CHAT_TOKENS_MAX + 1}, "less than or equal to 32768"),
        ({"stop": [""]}, "at least 1 character"),
        ({"stop": ["x"] * 17}, "at most 16 items"),
        ({"messages": []}, "at least 1 item"),
        ({"messages": [USER] * 513}, "at most 512 items"),
        ({"messages": [{"role": "user", "content": "x" * CHAT_CHARS_MAX}, USER]}, "262149"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "'developer', 'user' or 'assistant'"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "a message is role and text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'text'"),
        ({"messages": [{"role": "user", "content": None}]}, "valid string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "valid string"),
        ({"model": "run-1@x"}, "should match pattern"),
        ({"model": "../run"}, "should match pattern"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        request(**changes)
    assert reason in str(refused.value)


def test_a_model_is_a_run_with_or_without_a_version() -> None:
    assert split_model("run-1") == ("run-1", None)
    assert split_model("run-1@0") == ("run-1", 0)
