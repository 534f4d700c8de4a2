"""Following a run until it ends: snapshots from polling, shown live, as plain lines or as JSON.

The service may restart meanwhile. Whoever stops watching does not stop the run.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice

import typer
from pydantic_core import to_json
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.cli import render, text
from offbeat.cli.session import ExitCode, Session
from offbeat.client import POLL_S, OffbeatClient
from offbeat.contracts.runs import EventLevel, RunEvent, RunStatus, RunView
from offbeat.errors import UnavailableError

OUTAGE_MAX_S = 900.0
"""A service that is gone for longer will not be back soon: give up watching."""
EVENTS_SHOWN = 6
EVENTS_PER_POLL = 5000
"""Events read at once; the rest comes with the next poll."""
BAR_WIDTH = 40
WAITING = "waiting for the service"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    run: RunView
    values: Mapping[int, float]
    """The mean reward, or the loss, of each step so far."""
    events: Sequence[RunEvent]
    """New since the last snapshot; of those before the first one, only the last few."""
    waiting: bool = False
    """The service does not answer; the run is shown as it was last seen."""


def watch_to_end(session: Session, run: RunView) -> RunView:
    """Show the run until it ends, and return it as it ended."""
    show = print_plain
    if session.as_json:
        show = _print_json
    elif session.out.is_terminal:
        show = _show_live
    try:
        for snapshot in show(session, snapshots(session.client, run)):
            run = snapshot.run
    except KeyboardInterrupt:
        session.note(f"Stopped watching; {run.name} goes on. Again: offbeat watch {run.id}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if not session.as_json:
        session.out.print(render.summary_line(run, datetime.now(UTC)))
    return run


def snapshots(client: OffbeatClient, run: RunView) -> Iterator[Snapshot]:
    """The run at every poll; the last one shows how it ended.

    Raises `UnavailableError` when the service stays away longer than `OUTAGE_MAX_S`.
    """
    series = client.metrics(run.id, [run.headline]).series.get(run.headline, ())
    snapshot = Snapshot(
        run=run,
        values={point.step: point.value for point in series},
        events=tuple(deque(client.iter_events(run.id), EVENTS_SHOWN)),
    )
    after, answered_at = 0, time.monotonic()
    yield snapshot
    while not snapshot.run.status.is_final:
        after = snapshot.events[-1].id if snapshot.events else after
        time.sleep(POLL_S)
        try:
            snapshot = _next(client, snapshot, after)
            answered_at = time.monotonic()
        except UnavailableError:
            if time.monotonic() - answered_at > OUTAGE_MAX_S:
                raise
            snapshot = replace(snapshot, events=(), waiting=True)
        yield snapshot


def _next(client: OffbeatClient, last: Snapshot, after: int) -> Snapshot:
    # The status first: the events read after the end of a run are all there will be.
    run = client.run(last.run.id)
    events = tuple(islice(client.iter_events(run.id, after), EVENTS_PER_POLL))
    value = run.headline_value
    newest = {} if value is None else {run.progress.step: value}
    return Snapshot(run=run, values={**last.values, **newest}, events=events)


def _show_live(session: Session, seen: Iterator[Snapshot]) -> Iterator[Snapshot]:
    recent: deque[RunEvent] = deque(maxlen=EVENTS_SHOWN)
    with Live(console=session.out, auto_refresh=False) as live:
        for snapshot in seen:
            recent.extend(snapshot.events)
            live.update(frame(snapshot, recent, datetime.now(UTC)), refresh=True)
            yield snapshot


def frame(snapshot: Snapshot, recent: Iterable[RunEvent], now: datetime) -> RenderableType:
    """The live view: title, bar, numbers, the trend of reward or loss, and the last events."""
    run, progress = snapshot.run, snapshot.run.progress
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(
            total=progress.steps,
            completed=progress.step,
            width=BAR_WIDTH,
            complete_style="cyan",
            finished_style="green",
        ),
        Text(text.duration(render.elapsed_s(run, now)), "dim"),
        Text(WAITING if snapshot.waiting else "", "yellow"),
    )
    trend = Text(text.sparkline(list(snapshot.values.values())), "cyan")
    if run.spec.rewards:
        groups = f"  {progress.groups_generating} groups generating, {progress.groups_ready} ready"
        trend.append(groups, "dim")
    lines = [render.event_line(event, brief=True) for event in recent]
    return Group(render.run_title(run), bar, render.progress_line(run), trend, Text(), *lines)


def print_plain(session: Session, seen: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """A line a step, and the events that matter."""
    last: Snapshot | None = None
    for snapshot in seen:
        for event in snapshot.events:
            if event.level is not EventLevel.INFO:
                session.out.print(render.event_line(event))
        line = plain_line(snapshot.run, last.run if last else None)
        if line:
            session.out.print(line)
        if snapshot.waiting and not (last and last.waiting):
            session.note(WAITING)
        last = snapshot
        yield snapshot


def plain_line(run: RunView, last: RunView | None) -> Text | None:
    """What is new since the run was last seen: a step, or that it waits. The end is told apart."""
    is_waiting = run.status in (RunStatus.QUEUED, RunStatus.PAUSED)
    is_new = last is None or run.progress.step != last.progress.step
    if not is_new and (run.status.is_final or (last and run.status is last.status)):
        return None
    status = f"{run.status}  " if is_waiting else ""
    return Text.assemble((status, render.STATUS_STYLES[run.status]), render.progress_line(run))


def _print_json(_: Session, seen: Iterator[Snapshot]) -> Iterator[Snapshot]:
    """The run as one line of JSON, each time its status or its step has changed."""
    shown = None
    for snapshot in seen:
        state = (snapshot.run.status, snapshot.run.progress.step)
        if state != shown:
            typer.echo(to_json(snapshot.run))
        shown = state
        yield snapshot
