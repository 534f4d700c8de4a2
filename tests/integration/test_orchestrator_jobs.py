"""Leases, attempts and messages: what happens to a job whatever its worker and the broker do."""

import json
from pathlib import Path
from typing import cast

import httpx
import pytest
import redis

from offbeat.contracts.leases import CompleteRequest, LeaseRequest
from offbeat.errors import LeaseLostError
from offbeat.objects import S3ObjectStore
from tests.orchestrator import (
    GENERATOR,
    MESSAGE_LOST_S,
    TRAINER,
    Hand,
    Orchestrator,
    events,
    kinds,
    plausible_output,
    running_orchestrator,
    set_up,
    status,
    submit,
)
from tests.waiting import wait_until


def test_only_the_holder_completes_and_a_repetition_is_the_same(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    lease = hand.leased(GENERATOR)
    output = plausible_output(lease)
    other = CompleteRequest(attempt=1, worker_id="other", output=output)
    with pytest.raises(LeaseLostError):
        orchestrator.worker.complete(lease.job_id, other)
    with pytest.raises(LeaseLostError):
        orchestrator.worker.lease(lease.job_id, LeaseRequest(attempt=1, worker_id="other"))
    hand.complete(lease)
    hand.complete(lease)
    late = CompleteRequest(attempt=2, worker_id="hand", output=output)
    with pytest.raises(LeaseLostError):
        orchestrator.worker.complete(lease.job_id, late)


def test_attempts_that_are_void_are_refused(orchestrator: Orchestrator, http: httpx.Client) -> None:
    submit(http)
    hand = Hand(orchestrator)
    message = hand.message(GENERATOR)
    assert message is not None
    with pytest.raises(LeaseLostError, match="is not to be had"):
        orchestrator.worker.lease(message.job_id, LeaseRequest(attempt=2, worker_id="hand"))


def test_a_second_message_of_a_step_that_is_done_is_void(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """It comes while the groups of the next step, and so its job, are not there."""
    submit(http, staleness={"max_versions": 0})
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    step = hand.leased(TRAINER)
    assert step.input.kind == "train"
    hand.complete(step)
    with pytest.raises(LeaseLostError, match="the job is done, at attempt 1"):
        orchestrator.worker.lease(step.job_id, LeaseRequest(attempt=1, worker_id="other"))


def test_x2_a_silent_worker_loses_its_job_to_a_new_attempt(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    silent = hand.leased(GENERATOR)
    orchestrator.pass_time(31)
    again = hand.leased(GENERATOR)
    assert (again.job_id, again.attempt) == (silent.job_id, 2)
    with pytest.raises(LeaseLostError):
        hand.complete(silent)
    hand.complete(again)
    requeued = [e for e in events(http, run_id) if e["kind"] == "job_requeued"]
    assert [event["level"] for event in requeued] == ["warning"]


def test_a_job_out_of_attempts_ends_the_run_with_the_reason(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, limits={"max_attempts": 2})
    hand = Hand(orchestrator)
    for _ in range(2):
        lease = hand.leased(GENERATOR)
        hand.fail(lease, "no disk left")
    wait_until(lambda: status(http, run_id) == "failed")
    reason = http.get(f"/v1/runs/{run_id}").json()["status_reason"]
    assert reason == "its prepare job failed: no disk left"


def test_bad_data_fails_the_run_at_once(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    lease = hand.leased(GENERATOR)
    hand.fail(lease, "row 3: the prompt is empty", permanent=True)
    wait_until(lambda: status(http, run_id) == "failed")
    assert kinds(http, run_id)[-2:] == ["job_failed", "run_failed"]


def test_a_poison_prompt_is_dropped_and_the_run_goes_on(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Q6: attempts are counted in the database, so a poison job ends, whatever the broker does."""
    run_id = submit(http, limits={"max_attempts": 1}, staleness={"max_versions": 0})
    hand = Hand(orchestrator)
    set_up(hand)
    poison = hand.leased(GENERATOR)
    hand.fail(poison, "the worker died")
    fresh = hand.work(GENERATOR)
    assert fresh is not None
    assert fresh.input.kind == "generate"
    assert [group.group_id for group in fresh.input.groups] == ["g000002", "g000003"]
    dropped = [e for e in events(http, run_id) if e["kind"] == "groups_dropped"]
    assert [event["data"] for event in dropped] == [
        {"reason": "job_lost", "group_ids": ["g000000", "g000001"]}
    ]
    assert status(http, run_id) == "running"


def test_an_emptied_broker_loses_nothing(
    orchestrator: Orchestrator, http: httpx.Client, valkey_url: str
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    with redis.Redis.from_url(valkey_url) as client:
        wait_until(lambda: client.llen("generate.default") == 1)
        client.flushall()
    orchestrator.pass_time(MESSAGE_LOST_S + 1)
    lease = hand.leased(GENERATOR)
    assert (lease.input.kind, lease.attempt) == ("prepare", 2)


def test_q2_a_retry_is_a_new_message_that_is_due_at_once(
    orchestrator: Orchestrator, http: httpx.Client, valkey_url: str
) -> None:
    """Nothing waits in the broker for its time, where a restored message would come twice."""
    submit(http)
    hand = Hand(orchestrator)
    lease = hand.leased(GENERATOR)
    hand.fail(lease, "no disk left")
    with redis.Redis.from_url(valkey_url) as client:
        wait_until(lambda: client.llen("generate.default") == 1)
        (body,) = cast("list[bytes]", client.lrange("generate.default", 0, -1))
    headers = json.loads(body)["headers"]
    assert (headers["eta"], headers["expires"], headers["retries"]) == (None, None, 0)
    again = hand.leased(GENERATOR)
    assert (again.job_id, again.attempt) == (lease.job_id, 2)
    assert plausible_output(again) != plausible_output(lease), "each attempt has keys of its own"


def test_a_run_survives_a_restart(
    tmp_path: Path, empty_broker: str, store: S3ObjectStore, database_url: str
) -> None:
    with running_orchestrator(tmp_path, empty_broker, store, database_url=database_url) as first:
        with httpx.Client(base_url=first.url) as http:
            run_id = submit(http)
        hand = Hand(first)
        set_up(hand)
        held = hand.leased(GENERATOR)
    with running_orchestrator(tmp_path, empty_broker, store, database_url=database_url) as second:
        hand = Hand(second)
        hand.complete(held)
        assert hand.work(TRAINER) is not None
        with httpx.Client(base_url=second.url) as http:
            wait_until(lambda: http.get(f"/v1/runs/{run_id}").json()["progress"]["version"] == 1)


def test_q7_the_queue_stays_shallow_and_its_messages_small(
    orchestrator: Orchestrator, http: httpx.Client, valkey_url: str
) -> None:
    for _ in range(5):
        submit(http)
    with redis.Redis.from_url(valkey_url) as client:
        wait_until(lambda: client.llen("generate.default") == 1)
        hand = Hand(orchestrator)
        for number in range(3):
            hand.report(GENERATOR, f"generator-{number}")
        wait_until(lambda: client.llen("generate.default") == 3)
        sizes = [len(body) for body in client.lrange("generate.default", 0, -1)]
    assert max(sizes) < 4096
