"""The `chat` job: answer a conversation with a policy, and speak while the answer is made.

    messages -> chat template -> engine, urgently -> text stream -> the listener's channel

The prompt is rendered as those of the run's data are, its system prompt included, so that one talks
to the policy that is trained. Nothing is stored.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from queue import Empty, SimpleQueue

import structlog
from transformers import PreTrainedTokenizerBase

from offbeat.chat_channel import ChatSpeaker
from offbeat.contracts.chat import (
    CHAT_TOKENS_MAX,
    ChatFailed,
    ChatFinished,
    ChatInput,
    ChatMessage,
    ChatOutput,
    ChatPiece,
    ChatStarted,
    ChatText,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.data.prompts import render_prompt
from offbeat.data.rows import SourceRow
from offbeat.errors import IntegrityError, InvalidRequestError, LeaseLostError, OffbeatError
from offbeat.worker import JobContext
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.models import BaseModel, BaseModels
from services.generator.shelf import Policy
from services.generator.text_stream import TextStream
from services.generator.weights import RunPolicies

log = structlog.get_logger(__name__)

VERSION_WAIT_S = 60.0
"""How long a person waits for a first version to be pulled and proved."""
SILENCE_S = 1.0
"""After so long without a token the answer looks whether it is still wanted."""


class Answer:
    """One answer on its way to its listener."""

    def __init__(self, context: JobContext, speaker: ChatSpeaker) -> None:
        self._context = context
        self._speaker = speaker

    def say(self, piece: ChatPiece) -> None:
        """Send a piece; raises as `check` does."""
        self._context.check()
        if not self._speaker.say(self._context.lease.job_id, piece):
            raise self._given_up()

    def check(self) -> None:
        """Raise `LeaseLostError` once nobody listens, or the job was taken away."""
        self._context.check()
        if not self._speaker.is_heard(self._context.lease.job_id):
            raise self._given_up()

    def _given_up(self) -> LeaseLostError:
        return LeaseLostError(f"nobody listens to job {self._context.lease.job_id} any more")


def chat(context: JobContext, models: BaseModels, speaker: ChatSpeaker) -> ChatOutput:
    """Answer, or tell the listener why there is no answer.

    A question that cannot be answered is no failure of the job.
    """
    answer = Answer(context, speaker)
    try:
        return _answer(context, models, answer)
    except LeaseLostError:
        raise
    except InvalidRequestError as mistake:
        answer.say(ChatFailed(is_mistake=True, message=mistake.detail))
        return ChatOutput(completion_tokens=0)
    except Exception as error:
        with suppress(LeaseLostError):
            answer.say(ChatFailed(is_mistake=False, message=_reason(error)))
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, IntegrityError):
        return f"the version is refused: {error.detail}"
    return error.detail if isinstance(error, OffbeatError) else "the generator failed"


def _answer(context: JobContext, models: BaseModels, answer: Answer) -> ChatOutput:
    lease = context.lease
    job = lease.input
    assert isinstance(job, ChatInput)
    with (
        models.use(lease.spec.model) as model,
        _lent(model.policies(lease.run_id), job.version, context.check) as policy,
    ):
        tokenizer = _tokenizer(model, lease.spec.model.chat_template)
        prompt_ids = _prompt_ids(tokenizer, lease.spec, job.messages)
        sampling = Sampling(
            max_new_tokens=min(
                job.max_tokens or lease.spec.rollout.max_new_tokens,
                _room(len(prompt_ids), model.positions_max),
            ),
            temperature=job.temperature,
            top_p=job.top_p,
            stop=job.stop,
        )
        answer.say(
            ChatStarted(
                version=policy.version,
                adapter_sha256=policy.adapter_sha256,
                prompt_tokens=len(prompt_ids),
            )
        )
        request = SampleRequest(prompt_ids=prompt_ids, seeds=(job.seed,))
        text = TextStream(tokenizer, job.stop)
        completion = _speak(model, policy, request, sampling, text, answer)
    num_tokens = len(completion.ids)
    answer.say(ChatFinished(finish_reason=completion.finish_reason, completion_tokens=num_tokens))
    log.info("Answered.", version=policy.version, tokens=num_tokens)
    return ChatOutput(completion_tokens=num_tokens)


def _speak(
    model: BaseModel,
    policy: Policy,
    request: SampleRequest,
    sampling: Sampling,
    text: TextStream,
    answer: Answer,
) -> Completion:
    """Have the engine answer in another thread, and say what it has while it goes on."""
    tokens: SimpleQueue[Sequence[int]] = SimpleQueue()
    given_up = False

    def check() -> None:
        if given_up:
            raise LeaseLostError("the answer was given up")

    with ThreadPoolExecutor(1, thread_name_prefix="chat-engine") as pool:
        made = pool.submit(
            lambda: model.engine.generate(
                [request], policy.name, sampling, urgent=True, check=check, on_tokens=tokens.put
            )
        )
        made.add_done_callback(lambda _: tokens.put(()))
        num_said = 0
        try:
            while not (made.done() and tokens.empty()):
                ids = _news(tokens)
                num_said += len(ids)
                _say(answer, text.push(ids))
        finally:
            given_up = True
    ((completion,),) = made.result()
    # What an engine that does not stream has made, and what was held back.
    _say(answer, text.push(completion.ids[num_said:]) + text.finish())
    return completion


def _news(tokens: SimpleQueue[Sequence[int]]) -> list[int]:
    """The tokens that have come; none where the engine is done, or silent for a while."""
    ids: list[int] = []
    with suppress(Empty):
        ids += tokens.get(timeout=SILENCE_S)
        while True:
            ids += tokens.get_nowait()
    return ids


def _say(answer: Answer, text: str) -> None:
    """Text, or only a look whether it is still wanted."""
    if text:
        answer.say(ChatText(text=text))
    else:
        answer.check()


@contextmanager
def _lent(
    policies: RunPolicies, version: int | None, check: Callable[[], None]
) -> Iterator[Policy]:
    """The newest version at hand, or exactly the one that is asked for."""
    if version is None:
        lent = policies.newest(0, check=check, timeout_s=VERSION_WAIT_S)
    else:
        lent = policies.exact(version, check=check)
    with lent as policy:
        yield policy


def _tokenizer(model: BaseModel, chat_template: str | None) -> PreTrainedTokenizerBase:
    """The model's tokenizer with the template of the run, which other runs may not have."""
    if chat_template is None:
        return model.tokenizer
    tokenizer = copy(model.tokenizer)
    tokenizer.chat_template = chat_template
    return tokenizer


def _prompt_ids(
    tokenizer: PreTrainedTokenizerBase, spec: RunSpec, messages: Sequence[ChatMessage]
) -> tuple[int, ...]:
    is_text = len(messages) == 1 and messages[0].role == "user"
    row = SourceRow(
        index=0,
        place="messages",
        prompt=messages[0].content if is_text else [message.model_dump() for message in messages],
        columns={},
        size_bytes=0,
    )
    ids = render_prompt(tokenizer, row, spec.data).ids
    if not ids:
        raise InvalidRequestError("messages: the prompt has no tokens: write something")
    return ids


def _room(num_prompt_tokens: int, positions_max: int | None) -> int:
    """Tokens of the answer that the model has positions for."""
    if positions_max is None:
        return CHAT_TOKENS_MAX
    room = positions_max - num_prompt_tokens
    if room < 1:
        raise InvalidRequestError(
            f"messages: they have {num_prompt_tokens} tokens and the model has {positions_max} "
            "positions for messages and answer: shorten the conversation"
        )
    return room
