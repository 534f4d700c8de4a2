"""The orchestrator's REST surface over values that a test sets, for the client and the command.

It can be told to refuse requests, to break off streams, and to move a run on at every look.
"""

import io
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import APIRouter, Body, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import JsonValue
from starlette.types import Message, Send

from offbeat.contracts.runs import (
    CheckpointView,
    MetricPoint,
    MetricSeries,
    Page,
    RolloutView,
    RunEvent,
    RunStatus,
    RunView,
    WorkerView,
)
from offbeat.errors import ConflictError, NotFoundError, UnauthorizedError, UnavailableError
from offbeat.specs import validate_spec
from offbeat.web import install_errors
from tests import run_views

T = TypeVar("T")
ADAPTER = {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}"}


def adapter_zip(files: dict[str, bytes]) -> bytes:
    """A zip of these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return buffer.getvalue()


@dataclass(kw_only=True)
class FakeOrchestrator:
    """What the routes answer from."""

    runs: list[RunView] = field(default_factory=list)
    """Newest first."""
    events: list[RunEvent] = field(default_factory=list)
    rollouts: list[RolloutView] = field(default_factory=list)
    workers: list[WorkerView] = field(default_factory=list)
    checkpoints: list[CheckpointView] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    api_key: str | None = None
    refusals: int = 0
    """So many requests are answered with 503."""
    stream_breaks_after: int | None = None
    """Each connection of an event stream breaks off after so many events."""
    ends_as: RunStatus | None = None
    """At every look the run is a step further, and at its last step it ends so."""
    first_step: int = 0
    """Where a submitted run begins: near its end, to make it short."""
    ids_by_key: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)

    def app(self) -> FastAPI:
        """An application over this state, which outlives it."""
        app = FastAPI()
        app.state.fake = self
        install_errors(app)
        app.include_router(router)
        return app

    def find(self, run_id: str) -> RunView:
        """The run, or 404."""
        for run in self.runs:
            if run.id == run_id:
                return run
        raise NotFoundError(f"there is no run {run_id!r}")

    def replace(self, run: RunView) -> RunView:
        """Put a newer view in the place of the old one."""
        self.runs = [run if old.id == run.id else old for old in self.runs]
        return run

    def look(self, run_id: str) -> RunView:
        """The run, after it has moved on where it should."""
        run = self.find(run_id)
        if self.ends_as is None or run.status.is_final:
            return run
        step = run.progress.step + 1
        status = self.ends_as if step == run.progress.steps else RunStatus.RUNNING
        return self.replace(run_views.run(run_id, step=step, status=status, name=run.name))


def admitted(request: Request) -> FakeOrchestrator:
    """Note the request; refuse it where that is asked for, or where the key is wrong."""
    fake: FakeOrchestrator = request.app.state.fake
    fake.requests.append(request)
    if fake.refusals:
        fake.refusals -= 1
        raise UnavailableError("the database does not answer")
    if fake.api_key and request.headers.get("authorization") != f"Bearer {fake.api_key}":
        raise UnauthorizedError("send a valid key as `Authorization: Bearer <key>`")
    return fake


Fake = Annotated[FakeOrchestrator, Depends(admitted)]
router = APIRouter(prefix="/v1")


@router.post("/runs", status_code=201)
def create(
    fake: Fake,
    response: Response,
    body: Annotated[JsonValue, Body()],
    idempotency_key: Annotated[str, Header()],
) -> RunView:
    spec = validate_spec(body)
    if idempotency_key in fake.ids_by_key:
        response.status_code = 200
        return fake.find(fake.ids_by_key[idempotency_key])
    run_id = f"run-{len(fake.runs):010x}"
    fake.ids_by_key[idempotency_key] = run_id
    run = run_views.run(run_id, status=RunStatus.QUEUED, step=fake.first_step, name=spec.name)
    fake.runs.insert(0, run)
    return run


@router.get("/runs")
def list_runs(
    fake: Fake,
    status: RunStatus | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: int = 0,
) -> Page[RunView]:
    return page([run for run in fake.runs if status in (None, run.status)], limit, after)


@router.get("/runs/{run_id}")
def show(fake: Fake, run_id: str) -> RunView:
    return fake.look(run_id)


@router.post("/runs/{run_id}/{action}")
def act(fake: Fake, run_id: str, action: str) -> RunView:
    run = fake.find(run_id)
    if run.status.is_final and action != "retry":
        raise ConflictError(f"a run that is {run.status} cannot {action}")
    status = {
        "pause": RunStatus.PAUSED,
        "resume": RunStatus.RUNNING,
        "cancel": RunStatus.CANCELLED,
        "retry": RunStatus.RUNNING,
    }[action]
    return fake.replace(run.model_copy(update={"status": status}))


@router.get("/runs/{run_id}/events", response_model=Page[RunEvent])
def events(
    fake: Fake,
    request: Request,
    run_id: str,
    after: int = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    last_event_id: Annotated[int | None, Header()] = None,
) -> Page[RunEvent] | StreamingResponse:
    fake.find(run_id)
    if request.headers["accept"] == "text/event-stream":
        waiting = [event for event in fake.events if event.id > (last_event_id or after)]
        sent = waiting[: fake.stream_breaks_after]
        kind = StreamingResponse if sent == waiting else UnfinishedResponse
        return kind(event_stream(fake, run_id, sent), media_type="text/event-stream")
    found = [event for event in fake.events if event.id > after]
    cursor = str(found[limit - 1].id) if len(found) > limit else None
    return Page(data=tuple(found[:limit]), has_more=cursor is not None, next_cursor=cursor)


async def event_stream(
    fake: FakeOrchestrator, run_id: str, events: list[RunEvent]
) -> AsyncIterator[str]:
    """These events; the run then moves on, and the stream ends whether the run has or not."""
    yield ": keep-alive\n\n"
    for event in events:
        yield f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
    fake.look(run_id)


class UnfinishedResponse(StreamingResponse):
    """A stream whose connection breaks off where it should end."""

    async def stream_response(self, send: Send) -> None:
        async def unfinished(message: Message) -> None:
            if message.get("more_body", True):
                await send(message)

        await super().stream_response(unfinished)


@router.get("/runs/{run_id}/metrics")
def metrics(
    fake: Fake, run_id: str, name: Annotated[list[str] | None, Query()] = None
) -> MetricSeries:
    fake.find(run_id)
    series = {
        key: tuple(MetricPoint(step=step, value=value) for step, value in enumerate(values, 1))
        for key, values in fake.metrics.items()
        if name is None or key in name
    }
    return MetricSeries(run_id=run_id, series=series)


@router.get("/runs/{run_id}/rollouts")
def rollouts(
    fake: Fake,
    run_id: str,
    version: int | None = None,
    min_reward: float = float("-inf"),
    limit: int = 50,
    after: int = 0,
) -> Page[RolloutView]:
    """Two samples are looked at for one page, so pages come short as they may."""
    fake.find(run_id)
    seen = page(fake.rollouts, min(2, limit), after)
    found = [
        sample
        for sample in seen.data
        if (sample.reward or 0.0) >= min_reward and version in (None, sample.policy_version)
    ]
    return Page(data=tuple(found), has_more=seen.has_more, next_cursor=seen.next_cursor)


@router.get("/runs/{run_id}/checkpoints")
def checkpoints(fake: Fake, run_id: str, limit: int, after: int = 0) -> Page[CheckpointView]:
    fake.find(run_id)
    return page(fake.checkpoints, limit, after)


@router.get("/runs/{run_id}/adapter")
def adapter(fake: Fake, run_id: str, version: int | None = None) -> Response:
    fake.find(run_id)
    if version == 99:
        raise NotFoundError("there is no version 99")
    return Response(adapter_zip(ADAPTER), media_type="application/zip")


@router.get("/runs/{run_id}/diagnosis")
def diagnosis(fake: Fake, run_id: str) -> dict[str, JsonValue]:
    fake.find(run_id)
    return {"verdict": "Generation-bound.", "details": {"generators_alive": 1}}


@router.get("/workers")
def workers(fake: Fake) -> Page[WorkerView]:
    return page(fake.workers, 200, 0)


def page(items: list[T], limit: int, after: int) -> Page[T]:
    """The items from the place `after` on."""
    end = after + limit
    more = end < len(items)
    return Page(data=tuple(items[after:end]), has_more=more, next_cursor=str(end) if more else None)
