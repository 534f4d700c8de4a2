"""What many workers saw is written with their reports, each into the log of its run."""

from collections.abc import Iterator
from typing import Literal

import pytest

from offbeat.contracts.leases import WorkerEvent, WorkerReport
from offbeat.contracts.runs import EventLevel
from services.orchestrator.reports import Report, write_reports
from services.orchestrator.schema import WorkerRow
from services.orchestrator.store import Store, events_after
from tests.orchestrator_store import orchestrator_store, running_run, worker_report

NOW = 1_000_000.0


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """Two runs, and one that was deleted."""
    with orchestrator_store(
        database_url,
        running_run("b", created_at=NOW),
        running_run("a", created_at=NOW),
        running_run("gone", created_at=NOW, deleted_at=NOW),
    ) as store:
        yield store


def seen(
    run_id: str,
    kind: Literal["version_served", "canary_failed"] = "version_served",
    age_s: float = 0.0,
) -> WorkerEvent:
    return WorkerEvent(
        run_id=run_id, kind=kind, message=f"{kind} of {run_id}", data={"version": 3}, age_s=age_s
    )


def report(worker_id: str, *events: WorkerEvent) -> Report:
    return Report(worker_id=worker_id, body=worker_report(*events))


def log_of(store: Store, run_id: str) -> list[tuple[float, EventLevel, str, str]]:
    with store.read() as session:
        return [
            (event.at, event.level, event.message, event.data)
            for event in events_after(session, run_id, after=0, limit=10)
        ]


def test_each_gets_into_the_log_of_its_run_as_of_when_it_was_seen(store: Store) -> None:
    reports = [
        report("one", seen("b", age_s=4.0), seen("gone"), seen("a", "canary_failed")),
        report("two", seen("b", age_s=2.5)),
        report("three"),
    ]
    assert write_reports(store, reports, NOW) == [True, True, True]
    data = '{"worker_id": "%s", "version": 3}'
    served = "version_served of b"
    assert log_of(store, "b") == [
        (NOW - 4.0, EventLevel.INFO, served, data % "one"),
        (NOW - 2.5, EventLevel.INFO, served, data % "two"),
    ]
    assert log_of(store, "a") == [
        (NOW, EventLevel.WARNING, "canary_failed of a", data % "one"),
    ]
    assert log_of(store, "gone") == []


def test_what_a_worker_saw_is_not_kept_as_what_it_is(store: Store) -> None:
    write_reports(store, [report("one", seen("a"))], NOW)
    with store.read() as session:
        kept = session.get_one(WorkerRow, "one").report
    assert "events" not in kept
    assert WorkerReport.model_validate_json(kept).events == ()
