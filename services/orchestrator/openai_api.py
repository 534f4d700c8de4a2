"""`/v1/chat/completions` and `/v1/models`: a run's policy, for whatever speaks OpenAI's protocol.

client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="any")
client.chat.completions.create(model="run-3f9a0c11d2@12", messages=messages, stream=True)
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from anyio import CancelScope, create_task_group
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import select

from offbeat.contracts.chat import ChatFinished, ChatStarted, ChatText
from offbeat.contracts.completions import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    ErrorEnvelope,
    FinishReason,
    Model,
    ModelList,
    Usage,
)
from offbeat.errors import OffbeatError, UnavailableError
from offbeat.strict_routes import CLIENT_CLOSED
from services.orchestrator.access import check_run
from services.orchestrator.chat_turns import AnswerPiece, answer
from services.orchestrator.chats import check_version
from services.orchestrator.dependencies import CallerDep, ServicesDep, user
from services.orchestrator.live_streams import LiveStream
from services.orchestrator.openai_errors import OpenAIRoute, envelope
from services.orchestrator.openai_request import ChatRequest, ModelName, split_model
from services.orchestrator.schema import RunRow
from services.orchestrator.store import find_run

router = APIRouter(
    prefix="/v1",
    dependencies=[Depends(user)],
    route_class=OpenAIRoute,
    tags=["openai"],
    responses={code: {"model": ErrorEnvelope} for code in ("4XX", 503)},
)

MODELS_MAX = 1000
"""Newest runs that the list of models shows: OpenAI's has no pages."""

T = TypeVar("T")
Pieces = AsyncGenerator[AnswerPiece, None]


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def create(
    request: Request, services: ServicesDep, caller: CallerDep, body: ChatRequest
) -> Response:
    """Have a policy answer a conversation: whole, or as a stream with `"stream": true`."""
    if body.stream:
        services.streams.check()
    run_id, _ = split_model(body.model)
    pieces = answer(services, caller, run_id, body.question())
    turn = await _while_connected(request, _begun(pieces, run_id, int(services.clock())))
    if turn is None:
        return Response(status_code=CLIENT_CLOSED)
    if body.stream:
        events = _events(turn, include_usage=body.include_usage)
        return LiveStream(services.streams, events, sep="\n")
    whole = await _while_connected(request, _whole(turn))
    if whole is None:
        return Response(status_code=CLIENT_CLOSED)
    return JSONResponse(whole.model_dump())


@router.get("/models")
def list_models(services: ServicesDep, caller: CallerDep) -> ModelList:
    """The runs that can be talked to, newest first."""
    query = (
        select(RunRow)
        .where(
            RunRow.version.is_not(None),
            RunRow.deleted_at.is_(None),
            # Full fine-tuning has no adapter to talk to.
            ~RunRow.spec.contains('"lora":null', autoescape=True),
        )
        .order_by(RunRow.seq.desc())
    )
    if not caller.is_admin:
        query = query.where(RunRow.project_id == caller.project_id)
    with services.store.read() as session:
        return ModelList(data=tuple(map(_model, session.scalars(query.limit(MODELS_MAX)))))


@router.get("/models/{model}")
def show_model(services: ServicesDep, caller: CallerDep, model: ModelName) -> Model:
    """One run, or one version of it."""
    run_id, version = split_model(model)
    with services.store.read() as session:
        check_run(session, caller, run_id)
        run = find_run(session, run_id)
        newest = check_version(session, run, version)
        return _model(run).model_copy(
            update={"id": model, "version": newest if version is None else version}
        )


def _model(run: RunRow) -> Model:
    return Model(id=run.id, created=int(run.created_at), version=run.version or 0)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer that has begun, and what all its chunks say."""

    pieces: Pieces
    id: str
    created: int
    model: str
    system_fingerprint: str
    prompt_tokens: int

    def chunk(self, delta: Delta, finish_reason: FinishReason | None = None) -> ChatCompletionChunk:
        """The next chunk of the stream."""
        choice = ChunkChoice(delta=delta, finish_reason=finish_reason)
        return ChatCompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            system_fingerprint=self.system_fingerprint,
            choices=(choice,),
        )

    def usage(self, end: ChatFinished) -> Usage:
        """What the turn has cost."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=end.completion_tokens,
            total_tokens=self.prompt_tokens + end.completion_tokens,
        )


async def _begun(pieces: Pieces, run_id: str, created: int) -> Turn:
    started = await anext(pieces)
    assert isinstance(started, ChatStarted), "an answer begins with who gives it"
    return Turn(
        pieces=pieces,
        id=f"chatcmpl-{uuid4().hex}",
        created=created,
        model=f"{run_id}@{started.version}",
        system_fingerprint=started.adapter_sha256,
        prompt_tokens=started.prompt_tokens,
    )


async def _whole(turn: Turn) -> ChatCompletion:
    text = ""
    async with aclosing(turn.pieces):
        async for piece in turn.pieces:
            match piece:
                case ChatText():
                    text += piece.text
                case ChatFinished():
                    choice = Choice(
                        message=AnswerMessage(content=text), finish_reason=piece.finish_reason
                    )
                    return ChatCompletion(
                        id=turn.id,
                        created=turn.created,
                        model=turn.model,
                        system_fingerprint=turn.system_fingerprint,
                        choices=(choice,),
                        usage=turn.usage(piece),
                    )
    raise UnavailableError("the answer has no end: ask again")


async def _events(turn: Turn, *, include_usage: bool) -> AsyncIterator[str]:
    """The data of each event. The status is sent already, so an error is an event too."""
    hidden = None if include_usage else {"usage"}
    try:
        async with aclosing(_chunks(turn, include_usage=include_usage)) as chunks:
            async for chunk in chunks:
                yield chunk.model_dump_json(exclude=hidden)
    except OffbeatError as error:
        yield envelope(error).model_dump_json()
        return
    yield "[DONE]"


async def _chunks(turn: Turn, *, include_usage: bool) -> AsyncGenerator[ChatCompletionChunk, None]:
    async with aclosing(turn.pieces):
        yield turn.chunk(Delta(role="assistant", content=""))
        async for piece in turn.pieces:
            match piece:
                case ChatText():
                    yield turn.chunk(Delta(content=piece.text))
                case ChatFinished():
                    yield turn.chunk(Delta(), piece.finish_reason)
                    if include_usage:
                        end = turn.chunk(Delta())
                        yield end.model_copy(update={"choices": (), "usage": turn.usage(piece)})


async def _while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of the work; None where the client left, upon which the work is cancelled."""
    result: T | None = None
    failure: OffbeatError | None = None
    async with create_task_group() as group:
        group.start_soon(_cancel_when_gone, request, group.cancel_scope)
        try:
            result = await work
        except OffbeatError as error:
            failure = error  # raised below: a task group would wrap it
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


async def _cancel_when_gone(request: Request, scope: CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
