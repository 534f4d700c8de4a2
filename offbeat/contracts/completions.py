"""OpenAI's chat completions as Offbeat answers them, whole and as a stream, and its list of models.

Field names and nesting are OpenAI's (`openai.types.chat`), so that its stock clients read them.
`model` is `<run>@<version>`, and `system_fingerprint` the SHA-256 of the adapter that answered.
"""

from typing import Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from offbeat.contracts.base import Contract

FinishReason = Literal["stop", "length"]


class Usage(Contract):
    """Tokens of one turn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(Contract):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(Contract):
    """The only choice of a completion."""

    index: Literal[0] = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(Contract):
    """`POST /v1/chat/completions` without `stream`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[Choice, ...]
    usage: Usage


class Delta(Contract):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_new(self, handler: SerializerFunctionWrapHandler) -> dict[str, str]:
        return {name: value for name, value in handler(self).items() if value is not None}


class ChunkChoice(Contract):
    """The only choice of a chunk."""

    index: Literal[0] = 0
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(Contract):
    """One event of the stream; `[DONE]` follows the last one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChunkChoice, ...]
    """None in the chunk that carries the usage."""
    usage: Usage | None = None


class Model(Contract):
    """A run that can be talked to."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """When the run was created."""
    owned_by: Literal["offbeat"] = "offbeat"
    version: int
    """The newest version, or the one that is named."""


class ModelList(Contract):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class CompletionError(Contract):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(Contract):
    """The body of every error of these routes, and the last event of a stream that broke off."""

    error: CompletionError
