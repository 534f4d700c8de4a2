"""Runs of equal priority on the same workers, and groups whose jobs fail."""

from collections import Counter

import httpx
from sqlalchemy import select

from offbeat.contracts.jobs import GenerateInput
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import GroupRow
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Clock,
    Hand,
    Orchestrator,
    events,
    set_up,
    status,
    submit,
)
from tests.waiting import wait_until

ALWAYS_WORK = {"train": {"steps": 60}, "staleness": {"max_versions": 50}}
LONG_S, SHORT_S = 4.0, 1.0


def work_for(hand: Hand, seconds: float, length_s: dict[str, float]) -> Counter[str]:
    """Do what comes, as long as each run's jobs take; the seconds that each run has got."""
    clock = hand.orchestrator.clock
    assert isinstance(clock, Clock)
    served = Counter[str]()
    while served.total() < seconds:
        lease = hand.leased(GENERATOR)
        clock.now += length_s[lease.run_id]
        served[lease.run_id] += int(length_s[lease.run_id])
        hand.complete(lease)
    return served


def bring_to_version_0(hand: Hand, http: httpx.Client, run_id: str) -> None:
    """In no time, as the clock has it."""
    while http.get(f"/v1/runs/{run_id}").json()["progress"]["version"] is None:
        for role in (GENERATOR, TRAINER):
            hand.work(role, wait_s=0.1)


def test_runs_get_the_same_worker_seconds_whatever_their_jobs_take(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Apart from the job under way and the one whose message waits."""
    hand = Hand(orchestrator)
    long, short = submit(http, **ALWAYS_WORK), submit(http, **ALWAYS_WORK)
    for run_id in (long, short):
        bring_to_version_0(hand, http, run_id)
    served = work_for(hand, 40, {long: LONG_S, short: SHORT_S})
    assert abs(served[long] - served[short]) <= 2 * LONG_S


def test_a_run_that_comes_later_does_not_catch_up(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    hand = Hand(orchestrator)
    early = submit(http, **ALWAYS_WORK)
    bring_to_version_0(hand, http, early)
    work_for(hand, 60, {early: LONG_S})
    late = submit(http, **ALWAYS_WORK)
    bring_to_version_0(hand, http, late)
    served = work_for(hand, 40, {early: LONG_S, late: LONG_S})
    assert abs(served[early] - served[late]) <= 2 * LONG_S


def test_s10_jobs_that_fail_now_and_then_leave_no_group_waiting(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Every fifth is lost: its groups are dropped with a reason, others take their place."""
    hand = Hand(orchestrator)
    run_id = submit(http, train={"steps": 20}, limits={"max_attempts": 1})
    set_up(hand)
    done = 0
    while status(http, run_id) == "running":
        hand.work(TRAINER, wait_s=0.05)
        lease = hand.lease(GENERATOR, wait_s=0.2)
        if lease is None:
            continue
        assert isinstance(lease.input, GenerateInput)
        done += 1
        if done % 5:
            hand.complete(lease)
        else:
            hand.fail(lease, "HTTP 500")
    wait_until(lambda: status(http, run_id) == "succeeded")
    with orchestrator.store.read() as session:
        groups = session.scalars(select(GroupRow).where(GroupRow.run_id == run_id)).all()
    fates = Counter(group.status for group in groups)
    assert fates[GroupStatus.TRAINED] == 40
    assert set(fates) == {GroupStatus.TRAINED, GroupStatus.DROPPED}
    lost = [e["data"]["group_ids"] for e in events(http, run_id) if e["kind"] == "groups_dropped"]
    assert sum(map(len, lost)) == fates[GroupStatus.DROPPED]
