"""Events of many workers are written together, each into the log of its run."""

from collections.abc import Iterator

import pytest

from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.runs import EventLevel
from offbeat.errors import NotFoundError
from services.orchestrator.store import Store, events_after
from services.orchestrator.worker_events import PostedEvent, write_worker_events
from tests.orchestrator_store import orchestrator_store, running_run

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


def served(worker_id: str) -> WorkerEvent:
    return WorkerEvent(
        kind="version_served", worker_id=worker_id, message=worker_id, data={"version": 3}
    )


def refused(worker_id: str) -> WorkerEvent:
    return WorkerEvent(
        kind="canary_failed", worker_id=worker_id, message=worker_id, data={"version": 3}
    )


def log_of(store: Store, run_id: str) -> list[tuple[EventLevel, str, str]]:
    with store.read() as session:
        return [
            (event.level, event.kind, event.message)
            for event in events_after(session, run_id, after=0, limit=10)
        ]


def test_each_gets_into_the_log_of_its_run(store: Store) -> None:
    posted = [
        PostedEvent(run_id="b", body=served("one")),
        PostedEvent(run_id="gone", body=served("two")),
        PostedEvent(run_id="a", body=refused("three")),
        PostedEvent(run_id="b", body=served("four")),
    ]
    first, second, third, fourth = write_worker_events(store, posted, NOW)
    assert (first, third, fourth) == (None, None, None)
    assert isinstance(second, NotFoundError)
    assert log_of(store, "b") == [
        (EventLevel.INFO, "version_served", "one"),
        (EventLevel.INFO, "version_served", "four"),
    ]
    assert log_of(store, "a") == [(EventLevel.WARNING, "canary_failed", "three")]
    assert log_of(store, "gone") == []
