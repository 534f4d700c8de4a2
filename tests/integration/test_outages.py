"""The object store or the weight-proxy is away: runs lose time by it and nothing else."""

import threading
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Response
from sqlalchemy import select

from offbeat.contracts.jobs import JobKind, JobOutput, JobStatus
from offbeat.errors import OutageError, UnavailableError
from offbeat.http import ServiceClient
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from offbeat.web import install_errors
from offbeat.worker import JobContext, JobRunner
from scripts.chaos.relay import Relay
from scripts.parts import free_port
from services.orchestrator.outages import OUTAGE_MAX_S, WAIT_MAX_S
from services.orchestrator.schema import JobRow
from tests.following import following
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Clock,
    Hand,
    Orchestrator,
    events,
    kinds,
    set_up,
    status,
    submit,
    worker_statuses,
)
from tests.policies import Reference
from tests.servers import serve
from tests.waiting import wait_until
from tests.weight_proxy import running_proxy

AWAY = "the object store failed on 'runs/x': connection refused"


def job(orchestrator: Orchestrator, job_id: str) -> JobRow:
    with orchestrator.store.read() as session:
        return session.scalars(select(JobRow).where(JobRow.id == job_id)).one()


def test_attempts_that_end_in_an_outage_do_not_count_and_the_job_waits_longer_each_time(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, limits={"max_attempts": 1})
    hand = Hand(orchestrator)
    assert isinstance(orchestrator.clock, Clock)
    waits_s: list[float] = []
    for attempt in range(1, 8):
        lease = hand.leased(GENERATOR)
        assert lease.attempt == attempt
        hand.fail(lease, AWAY, outage=True)
        waiting = job(orchestrator, lease.job_id)
        assert waiting.not_before is not None
        waits_s.append(waiting.not_before - orchestrator.clock.now)
        orchestrator.pass_time(waits_s[-1])
    assert waits_s == [2, 2, 4, 8, 16, 32, WAIT_MAX_S]
    last = hand.work(GENERATOR)
    assert last is not None
    assert status(http, run_id) == "running"
    done = job(orchestrator, last.job_id)
    assert (done.status, done.failures, done.outage_since) == (JobStatus.DONE, 0, None)


def test_a_job_that_waits_for_the_end_of_an_outage_lets_others_go_first(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    held = hand.leased(GENERATOR)
    hand.fail(held, AWAY, outage=True)
    other = submit(http)
    lease = hand.leased(GENERATOR)
    assert lease.run_id == other


def test_a_clock_that_was_ahead_keeps_no_job_waiting(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    lease = hand.leased(GENERATOR)
    hand.fail(lease, AWAY, outage=True)
    orchestrator.pass_time(-3600.0)
    again = hand.leased(GENERATOR)
    assert again.attempt == 2


def test_the_log_and_the_diagnosis_say_once_that_a_run_waits_and_that_it_goes_on(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, staleness={"max_versions": 1})
    hand = Hand(orchestrator)
    set_up(hand)
    for _ in range(3):
        for lease in [hand.leased(GENERATOR) for _ in range(2)]:
            hand.fail(lease, AWAY, outage=True)
        orchestrator.pass_time(8.0)
    for role in (GENERATOR, TRAINER):
        hand.report(role)
    verdict = http.get(f"/v1/runs/{run_id}/diagnosis").json()
    assert verdict["details"]["outage_s"] == 24
    assert verdict["verdict"].startswith("Jobs have waited for 24 s until a part that they need")
    orchestrator.pass_time(8.0)
    for _ in range(2):
        assert "outage_ended" not in kinds(http, run_id)
        assert hand.work(GENERATOR) is not None
    said = [e for e in events(http, run_id) if e["kind"].startswith("outage")]
    assert [event["kind"] for event in said] == ["outage_began", "outage_ended"]
    assert said[0]["level"] == "warning"
    assert said[0]["message"].endswith(AWAY)
    assert "job_requeued" not in kinds(http, run_id)


def test_attempts_count_again_when_an_outage_lasts_for_more_than_a_day(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, limits={"max_attempts": 1})
    hand = Hand(orchestrator)
    for _ in range(2):
        lease = hand.leased(GENERATOR)
        hand.fail(lease, AWAY, outage=True)
        orchestrator.pass_time(OUTAGE_MAX_S + 1)
    wait_until(lambda: status(http, run_id) == "failed")
    assert http.get(f"/v1/runs/{run_id}").json()["status_reason"].endswith(AWAY)


def test_an_outage_is_held_against_no_worker(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Three failures at what others do well, in the same time, would be a quarantine."""
    submit(http, train={"steps": 50}, staleness={"max_versions": 20})
    good, bad = Hand(orchestrator, worker_id="good"), Hand(orchestrator, worker_id="bad")
    for hand in (good, bad):
        hand.report(GENERATOR, hand.worker_id)
    set_up(good)
    for _ in range(4):
        lease = bad.leased(GENERATOR)
        bad.fail(lease, AWAY, outage=True)
        assert good.work(GENERATOR) is not None
    assert worker_statuses(http) == {"good": "alive", "bad": "alive"}


def test_a_worker_reports_an_outage_as_one_and_takes_no_job_for_a_while(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http, limits={"max_attempts": 1})
    message = Hand(orchestrator).message(GENERATOR)
    assert message is not None

    def away(_: JobContext) -> JobOutput:
        raise OutageError(AWAY)

    runner = JobRunner(orchestrator.worker, "hand", {JobKind.PREPARE: away})
    working = threading.Thread(target=runner.run, args=(message,))
    working.start()
    wait_until(lambda: job(orchestrator, message.job_id).outage_since is not None)
    assert working.is_alive()
    runner.take_no_more()
    working.join(60)
    assert not working.is_alive()
    runner.close()
    waiting = job(orchestrator, message.job_id)
    assert (waiting.status, waiting.attempt, waiting.failures) == (JobStatus.QUEUED, 2, 0)


def test_a_store_that_does_not_answer_is_an_outage_and_a_wrong_key_is_none(
    s3_settings: ObjectStoreSettings,
) -> None:
    nobody = s3_settings.model_copy(update={"endpoint_url": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(OutageError, match="the object store failed on 'key'"):
        S3ObjectStore.connect(nobody).get("key")
    stranger = s3_settings.model_copy(update={"access_key_id": "stranger"})
    with pytest.raises(UnavailableError) as refused:
        S3ObjectStore.connect(stranger).put("key", b"")
    assert type(refused.value) is UnavailableError


def test_a_service_that_does_not_answer_is_an_outage_and_one_that_refuses_is_none() -> None:
    app = FastAPI()
    install_errors(app)

    @app.get("/gateway")
    def gateway() -> Response:
        return Response("upstream is gone", status_code=502)

    @app.get("/outage")
    def outage() -> None:
        raise OutageError("the database does not answer")

    @app.get("/busy")
    def busy() -> None:
        raise UnavailableError("1 readers wait already")

    def error(client: ServiceClient, path: str) -> type[BaseException] | None:
        with pytest.raises(UnavailableError) as raised:
            client.call("GET", path)
        return raised.type

    with serve(app) as url:
        client = ServiceClient(url)
        raised = [error(client, path) for path in ("/gateway", "/outage", "/busy")]
        client.close()
    assert raised == [OutageError, OutageError, UnavailableError]
    nobody = ServiceClient(f"http://127.0.0.1:{free_port()}")
    assert error(nobody, "/") is OutageError
    nobody.close()


def test_a_version_that_is_late_because_the_weight_proxy_is_away_is_an_outage(
    store: S3ObjectStore, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    reference = Reference(tiny_model)
    with running_proxy(store, tmp_path / "proxy") as proxy, Relay() as relay:
        relay.upstreams = (proxy.url,)
        with following(
            run_id, store, reference, relay.url, tiny_model, tmp_path / "adapters"
        ) as setting:
            setting.publish(0)
            setting.policies.start()
            setting.wait_for(0)

            def late() -> type[BaseException]:
                with pytest.raises(UnavailableError) as raised:
                    setting.policies.newest(1, timeout_s=0).__enter__()
                return raised.type

            assert late() is UnavailableError
            relay.close()
            wait_until(lambda: late() is OutageError)
            relay.open()
            setting.publish(1)
            setting.wait_for(1)
