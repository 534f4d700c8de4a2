"""`POST /v1/chat/completions` as a client sends it, and the question that it asks.

What cannot be done is refused, never ignored: an answer without the tool or the penalty that was
asked for would be a wrong one. Parameters that change no answer are taken and forgotten, and so is
any parameter at the value at which it does nothing.
"""

from collections.abc import Mapping
from secrets import randbits
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

from offbeat.contracts.chat import (
    CHAT_CHARS_MAX,
    CHAT_MESSAGES_MAX,
    CHAT_TOKENS_MAX,
    ChatInput,
    ChatMessage,
)

SEED_BITS = 63
STOPS_MAX = 16

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""What is about OpenAI's own service, and says nothing about the answer."""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Values at which a parameter that is not supported does nothing; null does nothing anywhere."""

ModelName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[0-9]{1,9})?$")
]
"""`<run>`, or `<run>@<version>`."""


def split_model(model: str) -> tuple[str, int | None]:
    """The run and, where one is named, its version."""
    run_id, _, version = model.partition("@")
    return run_id, int(version) if version else None


def _one(n: int | None) -> int | None:
    if n not in (None, 1):
        raise ValueError("a request has one answer (n = 1): send it again for more")
    return n


Content = Annotated[str, Field(max_length=CHAT_CHARS_MAX)]


class TextPart(BaseModel):
    """One part of a message; only text is understood."""

    type: Literal["text"]
    text: Content


class RequestMessage(BaseModel):
    """A message of the conversation. An assistant's may come back as it was answered."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | list[TextPart]
    name: str | None = None
    """Taken and forgotten: chat templates have no place for it."""

    @model_validator(mode="after")
    def _is_only_text(self) -> Self:
        filled = sorted(key for key, value in (self.model_extra or {}).items() if value)
        if filled:
            raise ValueError(f"{', '.join(filled)} cannot be used here: a message is role and text")
        return self

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def to_chat(self) -> ChatMessage:
        """As the chat template gets it; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role=role, content=self.text)


class StreamOptions(BaseModel):
    """What else a stream carries."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Taken and forgotten."""


class ChatRequest(BaseModel):
    """The body. Defaults are OpenAI's, but for the length of the answer, which is the run's."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: ModelName
    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=CHAT_MESSAGES_MAX)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=CHAT_TOKENS_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=CHAT_TOKENS_MAX)] | None = None
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=STOPS_MAX)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, AfterValidator(_one)] = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        num_chars = sum(len(message.text) for message in self.messages)
        if num_chars > CHAT_CHARS_MAX:
            raise ValueError(
                f"messages have {num_chars} characters together; {CHAT_CHARS_MAX} are allowed: "
                "shorten the conversation"
            )
        for name, value in (self.model_extra or {}).items():
            if not (name in WITHOUT_EFFECT or value is None or value in NEUTRAL.get(name, ())):
                raise ValueError(f"{name} is not supported here: leave it out")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def question(self) -> ChatInput:
        """What a generator is asked."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return ChatInput(
            messages=tuple(message.to_chat() for message in self.messages),
            version=split_model(self.model)[1],
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=tuple(stop),
            seed=randbits(SEED_BITS) if self.seed is None else self.seed % 2**SEED_BITS,
        )
