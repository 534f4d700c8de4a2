"""`/v1/runs` and `/v1/workers`: create, list, show, change, and read what a run has said so far."""

from collections.abc import AsyncIterator
from typing import Annotated

from anyio import sleep
from anyio.to_thread import run_sync
from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from pydantic import JsonValue
from sqlalchemy import select
from sse_starlette import ServerSentEvent

from offbeat.contracts.jobs import JobKind, JobStatus
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import (
    CheckpointView,
    MetricPoint,
    MetricSeries,
    Page,
    RunEvent,
    RunStatus,
    RunView,
    WorkerView,
)
from offbeat.data.checks import check_spec_data
from offbeat.data.sft_rows import row_reader
from offbeat.specs import validate_spec
from services.orchestrator.access import own_part
from services.orchestrator.dependencies import CallerDep, Services, ServicesDep, UserRoute, user
from services.orchestrator.lifecycle import act
from services.orchestrator.live_streams import LiveStream
from services.orchestrator.quotas import check_quotas
from services.orchestrator.run_state import RunAction
from services.orchestrator.schema import SEQ_MAX, JobRow, MetricRow, RunRow, WorkerRow
from services.orchestrator.store import events_after, find_run, lock_run
from services.orchestrator.submission import check_sources, create_run
from services.orchestrator.views import checkpoint_view, event_view, run_view, worker_view

router = APIRouter(
    prefix="/v1",
    route_class=UserRoute,
    dependencies=[Depends(user)],
)

EVENT_POLL_S = 0.5
"""How often an event stream looks for news."""
EVENTS_PER_READ = 500

Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[int, Query(ge=0, le=SEQ_MAX)]


@router.post(
    "/runs",
    status_code=201,
    response_model=RunView,
    responses={200: {"model": RunView, "description": "It was there already."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": RunSpec.model_json_schema(
                        ref_template="#/components/schemas/RunSpec/$defs/{model}"
                    )
                }
            },
        }
    },
)
def create(
    services: ServicesDep,
    caller: CallerDep,
    response: Response,
    body: Annotated[JsonValue, Body()],
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> RunView:
    """Submit a run. The same `Idempotency-Key` and spec give the first run again, with 200."""
    spec = validate_spec(body)
    check_spec_data(spec.data, row_reader(spec))
    with services.store.read() as session:
        check_sources(session, caller, spec, services.objects.bucket)
    now = services.clock()
    created = create_run(services.store, caller, spec, idempotency_key, now)
    if not created.is_new:
        response.status_code = 200
    services.scheduler.wake()
    return show(services, created.run_id)


@router.get("/runs")
def list_runs(
    services: ServicesDep,
    caller: CallerDep,
    status: RunStatus | None = None,
    project: str | None = None,
    limit: Limit = 50,
    after: Cursor = SEQ_MAX,
) -> Page[RunView]:
    """The runs that the key may see, newest first."""
    query = (
        select(RunRow)
        .where(RunRow.seq < after, RunRow.deleted_at.is_(None))
        .order_by(RunRow.seq.desc())
        .limit(limit + 1)
    )
    if status is not None:
        query = query.where(RunRow.status == status)
    if not caller.is_admin:
        query = query.where(RunRow.project_id == caller.project_id)
    if project is not None:
        query = query.where(RunRow.project_id == project)
    with services.store.read() as session:
        rows = session.scalars(query).all()
        shown = rows[:limit]
        now = services.clock()
        more = len(rows) > limit
        return Page(
            data=tuple(run_view(session, row, now) for row in shown),
            has_more=more,
            next_cursor=str(shown[-1].seq) if more else None,
        )


@router.get("/runs/{run_id}")
def show(services: ServicesDep, run_id: str) -> RunView:
    """One run."""
    with services.store.read() as session:
        return run_view(session, find_run(session, run_id), services.clock())


@router.post("/runs/{run_id}/pause")
def pause(services: ServicesDep, run_id: str) -> RunView:
    """Start no more jobs; those under way finish and count."""
    return _act(services, run_id, RunAction.PAUSE)


@router.post("/runs/{run_id}/resume")
def resume(services: ServicesDep, run_id: str) -> RunView:
    """Go on after a pause."""
    return _act(services, run_id, RunAction.RESUME)


@router.post("/runs/{run_id}/cancel")
def cancel(services: ServicesDep, run_id: str) -> RunView:
    """End the run; workers drop its jobs at their next heartbeat."""
    return _act(services, run_id, RunAction.CANCEL)


@router.post("/runs/{run_id}/retry")
def retry(services: ServicesDep, run_id: str) -> RunView:
    """Take a failed or cancelled run up again from its last version."""
    return _act(services, run_id, RunAction.RETRY)


def _act(services: Services, run_id: str, action: RunAction) -> RunView:
    with services.store.write() as session:
        run = lock_run(session, run_id)
        before = run.status
        act(session, run, action, services.clock())
        if run.status is not before and action in (RunAction.RESUME, RunAction.RETRY):
            check_quotas(session, run.project_id)
    services.scheduler.wake()
    return show(services, run_id)


@router.get(
    "/runs/{run_id}/events",
    response_model=Page[RunEvent],
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def events(
    request: Request,
    services: ServicesDep,
    run_id: str,
    after: Cursor = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    last_event_id: Annotated[str | None, Header(max_length=20, pattern=r"^\d{1,18}$")] = None,
) -> Page[RunEvent] | LiveStream:
    """The run's log as a page, or as a stream with `Accept: text/event-stream`."""
    page = await run_sync(_event_page, services, run_id, after, limit)
    if "text/event-stream" not in request.headers.get("accept", ""):
        return page
    start = min(int(last_event_id), SEQ_MAX) if last_event_id else after
    services.streams.check()
    return LiveStream(services.streams, _event_stream(services, run_id, start))


def _event_page(services: Services, run_id: str, after: int, limit: int) -> Page[RunEvent]:
    with services.store.read() as session:
        find_run(session, run_id)
        rows = events_after(session, run_id, after, limit + 1)
        more = len(rows) > limit
        return Page(
            data=tuple(event_view(row) for row in rows[:limit]),
            has_more=more,
            next_cursor=str(rows[limit - 1].id) if more else None,
        )


def _new_events(services: Services, run_id: str, after: int) -> tuple[bool, list[RunEvent]]:
    """Whether the run had ended before its events were read, and the events after the cursor."""
    with services.store.read() as session:
        ended = find_run(session, run_id).status.is_final
        rows = events_after(session, run_id, after, EVENTS_PER_READ)
        return ended, [event_view(row) for row in rows]


async def _event_stream(
    services: Services, run_id: str, after: int
) -> AsyncIterator[ServerSentEvent]:
    """Every event from the cursor on; the stream ends when the run has."""
    while True:
        ended, found = await run_sync(_new_events, services, run_id, after)
        for event in found:
            after = event.id
            yield ServerSentEvent(id=str(event.id), event=event.kind, data=event.model_dump_json())
        if ended and not found:
            return
        if not found:
            await sleep(EVENT_POLL_S)


@router.get("/runs/{run_id}/metrics")
def metrics(
    services: ServicesDep,
    run_id: str,
    name: Annotated[list[str] | None, Query(max_length=100)] = None,
) -> MetricSeries:
    """Series by name and step, under TRL's names; `name` may be repeated."""
    query = select(MetricRow).where(MetricRow.run_id == run_id)
    if name:
        query = query.where(MetricRow.name.in_(name))
    series: dict[str, list[MetricPoint]] = {}
    with services.store.read() as session:
        find_run(session, run_id)
        for row in session.scalars(query.order_by(MetricRow.name, MetricRow.step)):
            series.setdefault(row.name, []).append(MetricPoint(step=row.step, value=row.value))
    return MetricSeries(
        run_id=run_id, series={key: tuple(points) for key, points in series.items()}
    )


@router.get("/runs/{run_id}/checkpoints")
def checkpoints(
    services: ServicesDep, run_id: str, limit: Limit = 50, after: Cursor = 0
) -> Page[CheckpointView]:
    """The run's policy versions, oldest first."""
    with services.store.read() as session:
        find_run(session, run_id)
        rows = session.scalars(
            select(JobRow)
            .where(
                JobRow.run_id == run_id,
                JobRow.kind.in_([JobKind.INIT, JobKind.TRAIN]),
                JobRow.status == JobStatus.DONE,
                JobRow.seq > after,
            )
            .order_by(JobRow.seq)
            .limit(limit + 1)
        ).all()
        shown = rows[:limit]
        more = len(rows) > limit
        return Page(
            data=tuple(checkpoint_view(session, row) for row in shown),
            has_more=more,
            next_cursor=str(shown[-1].seq) if more else None,
        )


@router.get("/workers")
def workers(services: ServicesDep, caller: CallerDep) -> Page[WorkerView]:
    """Workers that reported within the last day."""
    now = services.clock()
    day_ago = now - 24 * 3600
    with services.store.read() as session:
        rows = session.scalars(
            select(WorkerRow).where(WorkerRow.last_seen_at > day_ago).order_by(WorkerRow.id)
        ).all()
        views = (worker_view(session, row, now) for row in rows)
        return Page(data=tuple(own_part(session, caller, view) for view in views), has_more=False)
