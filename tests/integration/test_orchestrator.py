"""The orchestrator over HTTP, with a real broker and store, and a worker that the test plays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from offbeat.contracts.jobs import (
    CompleteRequest,
    HeartbeatRequest,
    JobKind,
    LeaseRequest,
    WorkerEvent,
    WorkerRole,
)
from offbeat.contracts.weights import SkippedStep
from offbeat.errors import ConflictError, LeaseLostError, NotFoundError
from offbeat.objects import S3ObjectStore
from services.orchestrator.schema import Base, GroupRow, JobRow
from tests.orchestrator import (
    Clock,
    Hand,
    Orchestrator,
    plausible_output,
    running_orchestrator,
)
from tests.specs import spec_dict
from tests.waiting import wait_until

GENERATOR, TRAINER = WorkerRole.GENERATOR, WorkerRole.TRAINER


@pytest.fixture
def orchestrator(tmp_path: Path, valkey_url: str, store: S3ObjectStore) -> Iterator[Orchestrator]:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    with running_orchestrator(tmp_path, valkey_url, store) as running:
        yield running


@pytest.fixture
def http(orchestrator: Orchestrator) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=orchestrator.url) as client:
        yield client


def submit(http: httpx.Client, **changes: Any) -> str:
    response = http.post("/v1/runs", json=spec_dict(**changes))
    assert response.status_code == 201, response.text
    return response.json()["id"]


def events(http: httpx.Client, run_id: str) -> list[dict[str, Any]]:
    return http.get(f"/v1/runs/{run_id}/events", params={"limit": 1000}).json()["data"]


def kinds(http: httpx.Client, run_id: str) -> list[str]:
    return [event["kind"] for event in events(http, run_id)]


def set_up(hand: Hand) -> None:
    """Prepare and initialise the only run."""
    prepared, initialised = hand.work(GENERATOR), hand.work(TRAINER)
    assert prepared is not None
    assert initialised is not None


def status(http: httpx.Client, run_id: str) -> str:
    return http.get(f"/v1/runs/{run_id}").json()["status"]


def test_a_whole_run(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(
        http,
        data={"eval_size": 2},
        eval={"every_steps": 2},
        staleness={"max_versions": 0},
    )
    hand = Hand(orchestrator)
    done = [hand.work(role) for role in (GENERATOR, TRAINER, GENERATOR, GENERATOR)]
    done += [hand.work(role) for role in (TRAINER, GENERATOR, TRAINER, GENERATOR)]
    assert [lease.input.kind for lease in done if lease] == [
        JobKind.PREPARE,
        JobKind.INIT,
        JobKind.EVALUATE,
        JobKind.GENERATE,
        JobKind.TRAIN,
        JobKind.GENERATE,
        JobKind.TRAIN,
        JobKind.EVALUATE,
    ]
    wait_until(lambda: status(http, run_id) == "succeeded")
    assert kinds(http, run_id) == [
        "run_created",
        "run_started",
        "prompts_ready",
        "version_published",
        "evaluated",
        "version_published",
        "version_published",
        "evaluated",
        "run_succeeded",
    ]
    series = http.get(f"/v1/runs/{run_id}/metrics").json()["series"]
    assert series["reward"] == [{"step": 1, "value": 0.25}, {"step": 2, "value": 0.5}]
    assert series["eval/reward"] == [{"step": 0, "value": 0.5}, {"step": 2, "value": 0.5}]
    assert series["rollout/generated_tok_s"] == [
        {"step": 1, "value": 6.0},
        {"step": 2, "value": 6.0},
    ]
    progress = http.get(f"/v1/runs/{run_id}").json()["progress"]
    assert (progress["step"], progress["version"], progress["reward"]) == (2, 2, 0.5)
    checkpoints = http.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    assert [checkpoint["version"] for checkpoint in checkpoints] == [0, 1, 2]
    with orchestrator.store.read() as session:
        groups = session.query(GroupRow).order_by(GroupRow.index).all()
        assert [(g.index, g.status, g.trained_step) for g in groups] == [
            (0, "trained", 1),
            (1, "trained", 1),
            (2, "trained", 2),
            (3, "trained", 2),
        ]


def test_an_unknown_key_is_refused_with_the_nearest_name(http: httpx.Client) -> None:
    response = http.post("/v1/runs", json=spec_dict(train={"learning_rat": 1}))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == "https://offbeat.dev/problems/invalid-spec"
    assert "did you mean learning_rate?" in response.json()["detail"]


@pytest.mark.parametrize("body", ["", "[]", "null", '"x"', "{", '{"a": NaN}', "[" * 100_000])
def test_a_body_that_is_no_spec_is_refused(http: httpx.Client, body: str) -> None:
    response = http.post("/v1/runs", content=body, headers={"content-type": "application/json"})
    assert response.status_code == (400 if len(body) > 1000 else 422)
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


def test_pause_stops_new_work_and_keeps_what_is_under_way(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    under_way = hand.lease(GENERATOR)
    assert under_way is not None
    assert http.post(f"/v1/runs/{run_id}/pause").json()["status"] == "paused"
    assert http.post(f"/v1/runs/{run_id}/pause").status_code == 200
    void = hand.message(GENERATOR, wait_s=1)
    if void is not None:
        with pytest.raises(ConflictError):
            orchestrator.worker.lease(
                void.job_id, LeaseRequest(attempt=void.attempt, worker_id="hand")
            )
    hand.complete(under_way)
    assert hand.message(TRAINER, wait_s=1) is None
    assert http.post(f"/v1/runs/{run_id}/resume").json()["status"] == "running"
    train = hand.lease(TRAINER)
    assert train is not None
    assert train.input.kind == "train"


def test_cancel_takes_the_jobs_from_their_workers(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    held = hand.lease(GENERATOR)
    assert held is not None
    assert http.post(f"/v1/runs/{run_id}/cancel").json()["status"] == "cancelled"
    with pytest.raises(LeaseLostError):
        orchestrator.worker.heartbeat(
            held.job_id, HeartbeatRequest(attempt=held.attempt, worker_id="hand")
        )
    with pytest.raises(LeaseLostError):
        hand.complete(held)
    dropped = [e for e in events(http, run_id) if e["kind"] == "groups_dropped"]
    assert [event["data"]["reason"] for event in dropped] == ["run_ended"]
    assert http.post(f"/v1/runs/{run_id}/pause").status_code == 409


def test_retry_goes_on_from_the_last_version(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, staleness={"max_versions": 0})
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    hand.work(TRAINER)
    broken = hand.lease(GENERATOR)
    assert broken is not None
    http.post(f"/v1/runs/{run_id}/cancel")
    assert http.post(f"/v1/runs/{run_id}/retry").json()["status"] == "running"
    hand.work(GENERATOR)
    last = hand.work(TRAINER)
    assert last is not None
    assert last.input.kind == "train"
    assert last.input.base_version == 1
    wait_until(lambda: status(http, run_id) == "succeeded")


def test_only_the_holder_completes_and_a_repetition_is_the_same(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    lease = hand.lease(GENERATOR)
    assert lease is not None
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


def test_a_silent_worker_loses_its_job_to_a_new_attempt(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    silent = hand.lease(GENERATOR)
    assert silent is not None
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 31
    orchestrator.scheduler.wake()
    again = hand.lease(GENERATOR)
    assert again is not None
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
        lease = hand.lease(GENERATOR)
        assert lease is not None
        hand.fail(lease, "no disk left")
    wait_until(lambda: status(http, run_id) == "failed")
    reason = http.get(f"/v1/runs/{run_id}").json()["status_reason"]
    assert reason == "its prepare job failed: no disk left"


def test_bad_data_fails_the_run_at_once(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    lease = hand.lease(GENERATOR)
    assert lease is not None
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
    poison = hand.lease(GENERATOR)
    assert poison is not None
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
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 16
    orchestrator.scheduler.wake()
    lease = hand.lease(GENERATOR)
    assert lease is not None
    assert (lease.input.kind, lease.attempt) == ("prepare", 2)


def test_a_run_survives_a_restart(tmp_path: Path, valkey_url: str, store: S3ObjectStore) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    with running_orchestrator(tmp_path, valkey_url, store) as first:
        with httpx.Client(base_url=first.url) as http:
            run_id = submit(http)
        hand = Hand(first)
        set_up(hand)
        held = hand.lease(GENERATOR)
    assert held is not None
    with running_orchestrator(tmp_path, valkey_url, store) as second:
        hand = Hand(second)
        hand.complete(held)
        assert hand.work(TRAINER) is not None
        with httpx.Client(base_url=second.url) as http:
            wait_until(lambda: http.get(f"/v1/runs/{run_id}").json()["progress"]["version"] == 1)


def test_the_queue_stays_shallow(
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


def test_events_are_streamed_until_the_run_ends(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
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
        kind="canary_failed", worker_id="g1", message="Version 3 is not it.", data={"version": 3}
    )
    orchestrator.worker.event(run_id, event)
    last = events(http, run_id)[-1]
    assert (last["kind"], last["level"]) == ("canary_failed", "warning")
    assert last["data"] == {"worker_id": "g1", "version": 3}


def test_workers_are_listed_with_their_jobs(orchestrator: Orchestrator, http: httpx.Client) -> None:
    submit(http)
    hand = Hand(orchestrator)
    hand.report(GENERATOR, "hand")
    lease = hand.lease(GENERATOR)
    assert lease is not None
    (worker,) = http.get("/v1/workers").json()["data"]
    assert (worker["id"], worker["status"], worker["jobs"]) == ("hand", "alive", [lease.job_id])
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 21
    assert http.get("/v1/workers").json()["data"][0]["status"] == "lost"


def test_health_and_prometheus(orchestrator: Orchestrator, http: httpx.Client) -> None:
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


def test_attempts_that_are_void_are_refused(orchestrator: Orchestrator, http: httpx.Client) -> None:
    submit(http)
    hand = Hand(orchestrator)
    message = hand.message(GENERATOR)
    assert message is not None
    with pytest.raises(LeaseLostError, match="is not to be had"):
        orchestrator.worker.lease(message.job_id, LeaseRequest(attempt=2, worker_id="hand"))


def test_a_limit_on_worker_time_ends_the_run(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, limits={"max_gpu_seconds": 5})
    hand = Hand(orchestrator)
    lease = hand.lease(GENERATOR)
    assert lease is not None
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 6
    hand.complete(lease)
    wait_until(lambda: status(http, run_id) == "failed")
    with orchestrator.store.read() as session:
        assert {job.kind for job in session.query(JobRow)} == {"prepare"}


def test_dynamic_sampling_says_when_it_gives_up(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    rollout = {"dynamic_sampling": True, "oversampling_max": 1.5}
    run_id = submit(http, rollout=rollout, staleness={"max_versions": 0}, train={"steps": 1})
    hand = Hand(orchestrator, reward_std=0.0)
    set_up(hand)
    for _ in range(2):
        hand.work(GENERATOR)
    train = hand.work(TRAINER)
    assert train is not None
    assert train.input.kind == "train"
    assert [group.group_id for group in train.input.groups] == ["g000001", "g000002"]
    wait_until(lambda: status(http, run_id) == "succeeded")
    told = [e["data"] for e in events(http, run_id) if e["kind"] == "dynamic_sampling_gave_up"]
    assert told == [{"group_ids": ["g000001", "g000002"]}]
    series = http.get(f"/v1/runs/{run_id}/metrics").json()["series"]
    assert series["rollout/oversampling"] == [{"step": 1, "value": 1.5}]


def test_a_step_of_a_finished_run_is_replayed(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, train={"steps": 1})
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    trained = hand.work(TRAINER)
    wait_until(lambda: status(http, run_id) == "succeeded")
    too_far = http.post(f"/v1/runs/{run_id}/replays", json={"step": 2})
    assert (too_far.status_code, too_far.json()["detail"]) == (
        404,
        f"run {run_id} has not done step 2 yet",
    )
    asked = http.post(f"/v1/runs/{run_id}/replays", json={"step": 1})
    assert (asked.status_code, asked.json()["is_same"]) == (202, None)
    replayed = hand.work(TRAINER)
    assert trained is not None
    assert replayed is not None
    assert replayed.input.kind == "replay"
    assert trained.input.kind == "train"
    assert replayed.input.groups == trained.input.groups
    answer = http.get(f"/v1/runs/{run_id}/replays/{asked.json()['id']}").json()
    assert (answer["status"], answer["is_same"]) == ("done", False)
    assert kinds(http, run_id)[-1] == "replayed"


def test_a_skipped_step_is_an_event(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    lease = hand.lease(TRAINER)
    assert lease is not None
    output = plausible_output(lease)
    assert output.kind == "train"
    skipped = SkippedStep(reason="the loss is nan", in_a_row=1, batch_key="runs/x/skipped/1.json")
    manifest = output.manifest.model_copy(update={"skipped": skipped})
    output = output.model_copy(update={"manifest": manifest})
    request = CompleteRequest(attempt=1, worker_id="hand", output=output)
    orchestrator.worker.complete(lease.job_id, request)
    told = [event for event in events(http, run_id) if event["kind"] == "step_skipped"]
    assert [(event["level"], event["data"]) for event in told] == [
        ("warning", skipped.model_dump())
    ]


def test_the_schema_is_what_the_migrations_make(orchestrator: Orchestrator) -> None:
    with orchestrator.store.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
