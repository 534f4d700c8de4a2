"""Workers that fail, fall silent or leave, as runs and users see them; the test plays them."""

from collections import Counter
from contextlib import suppress
from itertools import cycle

import httpx
import pytest

from offbeat.contracts.jobs import GenerateInput
from offbeat.contracts.leases import LeaseRequest, ReleaseRequest, WorkerEvent
from offbeat.errors import HeldBackError
from services.orchestrator.quarantine import FIRST_QUARANTINE_S
from services.orchestrator.state import WORKER_LOST_S
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    Orchestrator,
    events,
    kinds,
    set_up,
    status,
    submit,
    worker_statuses,
)
from tests.waiting import wait_until

LONG = {"train": {"steps": 50}, "staleness": {"max_versions": 20}, "limits": {"max_attempts": 9}}


@pytest.fixture
def good(orchestrator: Orchestrator) -> Hand:
    hand = Hand(orchestrator, worker_id="good")
    hand.report(GENERATOR, "good")
    return hand


@pytest.fixture
def bad(orchestrator: Orchestrator) -> Hand:
    hand = Hand(orchestrator, worker_id="bad")
    hand.report(GENERATOR, "bad")
    return hand


def workers(http: httpx.Client) -> dict[str, dict[str, object]]:
    return {worker["id"]: worker for worker in http.get("/v1/workers").json()["data"]}


def fail_three_where_good_does_three(good: Hand, bad: Hand) -> None:
    """The fourth failure comes after the successes, and is the one that is judged."""
    held = [bad.leased(GENERATOR) for _ in range(2)]
    for lease in held:
        bad.fail(lease, "no disk left")
    for _ in range(3):
        assert good.work(GENERATOR) is not None
    last = bad.leased(GENERATOR)
    bad.fail(last, "no disk left")


def test_a_quarantine_holds_jobs_back_and_ends_by_itself(
    orchestrator: Orchestrator, http: httpx.Client, good: Hand, bad: Hand
) -> None:
    run_id = submit(http, **LONG)
    set_up(good)
    fail_three_where_good_does_three(good, bad)
    shown = workers(http)["bad"]
    assert shown["status"] == "quarantined"
    assert shown["quarantine"] == {
        "reason": "it failed 3 times in a row (generate) at what others do well",
        "until": "1970-01-12T13:47:10Z",
    }
    message = bad.message(GENERATOR)
    assert message is not None
    request = LeaseRequest(attempt=message.attempt, worker_id="bad")
    with pytest.raises(HeldBackError, match="in quarantine for 30 s") as held_back:
        orchestrator.worker.lease(message.job_id, request)
    assert held_back.value.retry_after_s == FIRST_QUARANTINE_S
    taken = good.leased(GENERATOR)
    while taken.job_id != message.job_id:
        good.complete(taken)
        taken = good.leased(GENERATOR)
    assert taken.attempt == message.attempt

    orchestrator.pass_time(FIRST_QUARANTINE_S)
    bad.report(GENERATOR, "bad")
    assert worker_statuses(http)["bad"] == "alive"
    assert bad.work(GENERATOR) is not None
    log = kinds(http, run_id)
    assert log.count("worker_quarantined") == 1
    assert log[-1] == "worker_returned"


def test_who_fails_again_after_a_quarantine_gets_twice_as_long(
    orchestrator: Orchestrator, http: httpx.Client, good: Hand, bad: Hand
) -> None:
    run_id = submit(http, **LONG)
    set_up(good)
    fail_three_where_good_does_three(good, bad)
    orchestrator.pass_time(FIRST_QUARANTINE_S)
    again = bad.leased(GENERATOR)
    bad.fail(again, "no disk left")
    said = [e["message"] for e in events(http, run_id) if e["kind"] == "worker_quarantined"]
    assert [message.split(":")[0] for message in said] == [
        "Worker bad gets no jobs for 30 s",
        "Worker bad gets no jobs for 60 s",
    ]


def test_versions_that_only_one_worker_refuses_are_its_own_fault(
    orchestrator: Orchestrator, http: httpx.Client, good: Hand, bad: Hand
) -> None:
    run_id = submit(http)
    for version in range(3):
        served = WorkerEvent(
            run_id=run_id, kind="version_served", message="-", data={"version": version}
        )
        refused = served.model_copy(update={"kind": "canary_failed"})
        good.report(GENERATOR, "good", (served,))
        bad.report(GENERATOR, "bad", (refused,))
    reason = workers(http)["bad"]["quarantine"]
    assert isinstance(reason, dict)
    assert reason["reason"] == "it failed 3 times in a row (serve) at what others do well"
    assert worker_statuses(http)["good"] == "alive"


def test_a_run_that_crashes_every_worker_takes_none_from_the_others(
    http: httpx.Client, good: Hand, bad: Hand
) -> None:
    """Invariant 5: both runs are on the same two workers."""
    poison, healthy = submit(http, limits={"max_attempts": 9}), submit(http, **LONG)
    failed, done = Counter[str](), Counter[str]()
    # Neither always comes first: else one could get all messages of one run.
    turns = cycle([(good, bad), (bad, good)])
    while min(failed["good"], failed["bad"], done["good"], done["bad"]) < 4:
        good.work(TRAINER, wait_s=0.05)
        for hand in next(turns):
            with suppress(HeldBackError):
                lease = hand.lease(GENERATOR, wait_s=0.2)
                if lease is None:
                    continue  # a trainer's job comes first
                if lease.run_id == poison and lease.input.kind == "generate":
                    hand.fail(lease, "the reward raised")
                    failed[hand.worker_id] += 1
                else:
                    hand.complete(lease)
                    done[hand.worker_id] += 1
    assert worker_statuses(http) == {"good": "alive", "bad": "alive"}
    assert "worker_quarantined" not in kinds(http, poison) + kinds(http, healthy)
    assert "job_requeued" not in kinds(http, healthy)


def test_a_job_is_tried_by_another_worker_before_the_one_that_failed_it(
    http: httpx.Client, good: Hand, bad: Hand
) -> None:
    submit(http, limits={"max_attempts": 2})
    lease = bad.leased(GENERATOR)
    bad.fail(lease, "no disk left")
    with pytest.raises(HeldBackError, match="has failed job"):
        bad.lease(GENERATOR)
    again = good.work(GENERATOR)
    assert again is not None
    assert again.attempt == 2


def test_a_worker_that_is_alone_may_try_again(http: httpx.Client, bad: Hand) -> None:
    submit(http)
    lease = bad.leased(GENERATOR)
    bad.fail(lease, "the network was away")
    assert bad.work(GENERATOR) is not None


def test_a_message_that_is_handed_back_is_sent_again_at_once(
    orchestrator: Orchestrator, http: httpx.Client, good: Hand
) -> None:
    submit(http)
    message = good.message(GENERATOR)
    assert message is not None
    request = ReleaseRequest(attempt=message.attempt, worker_id="leaver")
    orchestrator.worker.release(message.job_id, request)
    lease = good.leased(GENERATOR)
    assert (lease.job_id, lease.attempt) == (message.job_id, 1)


def test_x3_a_run_says_that_all_generators_are_gone_and_that_one_came(
    orchestrator: Orchestrator, http: httpx.Client, good: Hand
) -> None:
    run_id = submit(http)
    good.report(TRAINER, "trainer")
    set_up(good)
    orchestrator.pass_time(WORKER_LOST_S)
    good.report(TRAINER, "trainer")
    wait_until(lambda: "no_worker" in kinds(http, run_id))
    (event,) = [e for e in events(http, run_id) if e["kind"] == "no_worker"]
    assert (event["level"], event["data"]) == ("warning", {"role": "generator"})
    verdict = http.get(f"/v1/runs/{run_id}/diagnosis").json()["verdict"]
    assert verdict.startswith("No generator of pool 'default' takes jobs")

    good.report(GENERATOR, "another")
    wait_until(lambda: "worker_found" in kinds(http, run_id))
    lease = good.work(GENERATOR)
    assert lease is not None
    assert isinstance(lease.input, GenerateInput)
    assert status(http, run_id) == "running"
