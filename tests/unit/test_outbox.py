"""Events wait for a report that is delivered, within bounds."""

import pytest

from offbeat.contracts.leases import REPORT_EVENTS_MAX, WorkerEvent
from offbeat.errors import InvalidRequestError, OffbeatError, OutageError
from offbeat.outbox import WAITING_MAX, Outbox


def served(version: int) -> WorkerEvent:
    return WorkerEvent(
        run_id="r", kind="version_served", message=str(version), data={"version": version}
    )


def refused(version: int) -> WorkerEvent:
    return served(version).model_copy(update={"kind": "canary_failed"})


def filled(count: int) -> Outbox:
    outbox = Outbox()
    for version in range(count):
        outbox.add(served(version))
    return outbox


def send(outbox: Outbox, error: OffbeatError | None = None) -> list[str]:
    """What a report would tell, which ends in this way."""
    with outbox.sending() as events:
        if error is not None:
            raise error
        return [event.message for event in events]


def test_an_event_is_told_once_and_with_its_age() -> None:
    outbox = filled(2)
    with outbox.sending() as events:
        assert [event.message for event in events] == ["0", "1"]
        assert all(0 <= event.age_s < 60 for event in events)
    assert send(outbox) == []


def test_an_outage_loses_nothing_and_changes_no_order() -> None:
    outbox = filled(2)
    with pytest.raises(OutageError):
        send(outbox, OutageError("away"))
    outbox.add(served(2))
    assert send(outbox) == ["0", "1", "2"]


def test_what_was_refused_is_not_sent_for_ever() -> None:
    outbox = filled(2)
    with pytest.raises(InvalidRequestError):
        send(outbox, InvalidRequestError("wrong"))
    assert send(outbox) == []


def test_a_report_tells_the_oldest_and_the_next_one_comes_at_once() -> None:
    outbox = filled(REPORT_EVENTS_MAX + 1)
    assert not outbox.due.is_set(), "a version that is served can wait"
    assert send(outbox) == [str(version) for version in range(REPORT_EVENTS_MAX)]
    assert outbox.due.is_set()
    assert send(outbox) == [str(REPORT_EVENTS_MAX)]


def test_what_is_wrong_is_told_at_once() -> None:
    outbox = filled(1)
    outbox.add(refused(1))
    assert outbox.due.is_set()


def test_beyond_the_bound_the_oldest_are_given_up() -> None:
    outbox = filled(WAITING_MAX + 3)
    assert send(outbox)[0] == "3"
    for version in range(WAITING_MAX):
        outbox.add(served(version))
    with pytest.raises(OutageError):
        send(outbox, OutageError("away"))
    assert send(outbox)[0] == "0"
