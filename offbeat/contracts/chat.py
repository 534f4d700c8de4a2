"""A chat turn on its way: what is asked, and the pieces in which the answer comes back.

The question travels with a job like any other; the answer travels piece by piece through a channel
that forgets it (`offbeat.chat_channel`).
"""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.contracts.base import Contract
from offbeat.contracts.weights import Sha256

CHAT_TOKENS_MAX = 32_768
"""Tokens of one answer, at most; the model's own positions are often the closer bound."""
CHAT_MESSAGES_MAX = 512
CHAT_CHARS_MAX = 262_144
"""Characters of all messages together: the whole conversation is sent with every turn."""


class ChatMessage(Contract):
    """One message, as the chat template gets it."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(max_length=CHAT_CHARS_MAX)]


class ChatInput(Contract):
    """Answer the last message of a conversation, piece by piece through the chat channel."""

    kind: Literal["chat"] = "chat"
    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=CHAT_MESSAGES_MAX)]
    version: Annotated[int, Field(ge=0)] | None
    """Exactly this version; none takes the newest at hand."""
    max_tokens: Annotated[int, Field(ge=1, le=CHAT_TOKENS_MAX)] | None
    """Of the answer; none takes as many as the run's rollouts may have."""
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    stop: tuple[Annotated[str, Field(min_length=1)], ...]
    seed: Annotated[int, Field(ge=0, lt=2**63)]


class ChatOutput(Contract):
    """What is kept of an answer."""

    kind: Literal["chat"] = "chat"
    completion_tokens: Annotated[int, Field(ge=0)]


class ChatStarted(Contract):
    """The answer begins: who gives it."""

    kind: Literal["started"] = "started"
    version: Annotated[int, Field(ge=0)]
    adapter_sha256: Sha256
    prompt_tokens: Annotated[int, Field(ge=1)]


class ChatText(Contract):
    """More of the answer: whole characters, and nothing that belongs to a stop string."""

    kind: Literal["text"] = "text"
    text: str


class ChatFinished(Contract):
    """The answer is complete."""

    kind: Literal["finished"] = "finished"
    finish_reason: Literal["stop", "length"]
    completion_tokens: Annotated[int, Field(ge=1)]
    """With the tokens that are no text."""


class ChatFailed(Contract):
    """There is no answer, or no more of it."""

    kind: Literal["failed"] = "failed"
    is_mistake: bool
    """The question is wrong: asking it again would fail in the same way."""
    message: str


ChatPiece = Annotated[
    ChatStarted | ChatText | ChatFinished | ChatFailed, Field(discriminator="kind")
]
