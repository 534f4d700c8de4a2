"""The orchestrator's surface for users: requests, answers, streams, keys, health."""

import json
from pathlib import Path

import httpx
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from offbeat.contracts.leases import LeaseRequest, WorkerEvent
from offbeat.errors import NotFoundError
from offbeat.objects import S3ObjectStore
from offbeat.outbox import Outbox
from offbeat.presence import Presence
from services.orchestrator.schema import Base
from tests.orchestrator import (
    GENERATOR,
    Clock,
    Hand,
    Orchestrator,
    events,
    kinds,
    running_orchestrator,
    submit,
)
from tests.specs import spec_dict
from tests.waiting import wait_until


def test_an_unknown_key_is_refused_with_the_nearest_name(http: httpx.Client) -> None:
    response = http.post("/v1/runs", json=spec_dict(train={"learning_rat": 1}))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == "https://offbeat.dev/problems/invalid-spec"
    assert "did you mean learning_rate?" in response.json()["detail"]


@pytest.mark.parametrize("body", ["", "[]", "null", '"x"', "{", '{"a": NaN}', "[" * 100_000])
def test_a_body_that_is_no_spec_is_refused(http: httpx.Client, body: str) -> None:
    response = http.post("/v1/runs", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"


def test_a_body_past_the_limit_is_refused(http: httpx.Client) -> None:
    response = http.post("/v1/runs", content=b" " * (17 * 2**20))
    assert response.status_code == 413


def test_an_idempotency_key_gives_the_first_run_again(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "abc"}
    first = http.post("/v1/runs", json=spec_dict(), headers=headers)
    again = http.post("/v1/runs", json=spec_dict(), headers=headers)
    other = http.post("/v1/runs", json=spec_dict(name="other"), headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 409)
    assert first.json()["id"] == again.json()["id"]
    assert other.headers["x-should-retry"] == "false"


def test_lists_are_paged_newest_first(http: httpx.Client) -> None:
    ids = [submit(http, name=f"run {n}") for n in range(5)]
    first = http.get("/v1/runs", params={"limit": 3}).json()
    rest = http.get("/v1/runs", params={"limit": 3, "after": first["next_cursor"]}).json()
    assert [run["id"] for run in first["data"] + rest["data"]] == ids[::-1]
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert len(http.get("/v1/runs", params={"status": "paused"}).json()["data"]) == 0


def test_a_run_that_is_not_there_is_a_problem(http: httpx.Client) -> None:
    for path in ("", "/events", "/metrics", "/rollouts", "/checkpoints", "/adapter", "/diagnosis"):
        response = http.get(f"/v1/runs/run-none{path}")
        assert response.status_code == 404
        assert response.json()["detail"] == "there is no run 'run-none'"


def test_events_are_streamed_until_the_run_ends(http: httpx.Client) -> None:
    run_id = submit(http)
    wait_until(lambda: "run_started" in kinds(http, run_id))
    http.post(f"/v1/runs/{run_id}/cancel")
    headers = {"accept": "text/event-stream"}
    body = http.get(f"/v1/runs/{run_id}/events", headers=headers).text
    streamed = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    assert streamed == events(http, run_id)
    resumed = http.get(
        f"/v1/runs/{run_id}/events",
        headers={**headers, "last-event-id": str(streamed[-2]["id"])},
    ).text
    assert [line for line in resumed.splitlines() if line.startswith("event: ")] == [
        "event: run_cancelled"
    ]


def test_a_workers_event_reaches_the_log(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    event = WorkerEvent(
        run_id=run_id,
        kind="canary_failed",
        message="Version 3 is not it.",
        data={"version": 3},
    )
    Hand(orchestrator).report(GENERATOR, "g1", (event,))
    last = events(http, run_id)[-1]
    assert (last["kind"], last["level"]) == ("canary_failed", "warning")
    assert last["data"] == {"worker_id": "g1", "version": 3}


def test_a_worker_tells_what_it_saw_and_the_rest_when_it_leaves(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    outbox = Outbox()
    presence = Presence(orchestrator.worker, "g1", GENERATOR, "default", "e", outbox=outbox)
    served = WorkerEvent(
        run_id=run_id, kind="version_served", message="served", data={"version": 3}
    )
    failed = served.model_copy(update={"kind": "reward_failed"})

    def told() -> list[str]:
        return [kind for kind in kinds(http, run_id) if kind in (served.kind, failed.kind)]

    presence.start()
    outbox.add(served)
    outbox.add(failed)
    wait_until(lambda: told() == ["version_served", "reward_failed"])
    outbox.add(served)
    presence.leave()
    assert told() == ["version_served", "reward_failed", "version_served"]
    assert http.get("/v1/workers").json()["data"] == []


def test_workers_are_listed_with_their_jobs(orchestrator: Orchestrator, http: httpx.Client) -> None:
    submit(http)
    hand = Hand(orchestrator)
    hand.report(GENERATOR, "hand")
    lease = hand.leased(GENERATOR)
    (worker,) = http.get("/v1/workers").json()["data"]
    assert (worker["id"], worker["status"], worker["jobs"]) == ("hand", "alive", [lease.job_id])
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 21
    assert http.get("/v1/workers").json()["data"][0]["status"] == "lost"


def test_health_and_prometheus(http: httpx.Client) -> None:
    submit(http)
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    text = http.get("/metrics").text
    wait_until(lambda: 'offbeat_runs{status="running"} 1.0' in http.get("/metrics").text)
    assert "# TYPE offbeat_jobs gauge" in text
    document = http.get("/openapi.json").json()
    assert "/v1/runs/{run_id}/adapter" in document["paths"]
    assert not any(path.startswith("/internal") for path in document["paths"])


def test_every_route_asks_for_its_key(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with running_orchestrator(
        tmp_path, valkey_url, store, api_key="user-key", worker_token="worker-key"
    ) as running:
        with httpx.Client(base_url=running.url) as bare:
            assert bare.get("/v1/runs").status_code == 401
            assert bare.get("/v1/workers").status_code == 401
            assert bare.get("/healthz").status_code == 200
            crossed = {"authorization": "Bearer worker-key"}
            assert bare.get("/v1/runs", headers=crossed).status_code == 401
            right = {"authorization": "Bearer user-key"}
            assert bare.get("/v1/runs", headers=right).status_code == 200
            lease = LeaseRequest(attempt=1, worker_id="w").model_dump()
            path = "/internal/jobs/x/lease"
            assert bare.post(path, json=lease, headers=right).status_code == 401
        with pytest.raises(NotFoundError, match="there is no job 'x'"):
            running.worker.lease("x", LeaseRequest(attempt=1, worker_id="w"))


def test_the_schema_is_what_the_migrations_make(orchestrator: Orchestrator) -> None:
    with orchestrator.store.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
