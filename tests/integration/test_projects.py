"""Projects keep apart: runs, what they read from each other, keys, quotas and rates."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.jobs import GenerateOutput
from offbeat.contracts.leases import CompleteRequest, ServedVersion, WorkerReport
from offbeat.contracts.projects import Quotas
from offbeat.contracts.runs import RunStatus
from offbeat.errors import (
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    QuotaExceededError,
    RateLimitedError,
    UnauthorizedError,
)
from offbeat.objects import S3ObjectStore
from offbeat.projects import Projects
from services.orchestrator.rates import RateLimiter
from services.orchestrator.schema import KeyRow
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    Orchestrator,
    running_orchestrator,
)
from tests.plausible import SHA, plausible_output
from tests.run_views import worker
from tests.specs import spec_dict
from tests.waiting import wait_until

ADMIN_KEY, WORKER_TOKEN = "admin-key-0123456789", "worker-token-0123456789"


@pytest.fixture
def orchestrator(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[Orchestrator]:
    with running_orchestrator(
        tmp_path,
        empty_broker,
        store,
        database_url=database_url,
        api_key=ADMIN_KEY,
        worker_token=WORKER_TOKEN,
    ) as running:
        yield running


@pytest.fixture
def admin(orchestrator: Orchestrator) -> Iterator[OffbeatClient]:
    with OffbeatClient(orchestrator.url, ADMIN_KEY) as client:
        yield client


@pytest.fixture
def projects(admin: OffbeatClient) -> Projects:
    """Of which there are two beside `default`."""
    projects = Projects(admin)
    projects.create("a")
    projects.create("b")
    return projects


@pytest.fixture
def a(orchestrator: Orchestrator, projects: Projects) -> Iterator[OffbeatClient]:
    key = projects.create_key("a", "alice").secret
    with OffbeatClient(orchestrator.url, key, retry_for_s=0) as client:
        yield client


@pytest.fixture
def b(orchestrator: Orchestrator, projects: Projects) -> Iterator[OffbeatClient]:
    key = projects.create_key("b", "bob").secret
    with OffbeatClient(orchestrator.url, key, retry_for_s=0) as client:
        yield client


def test_a_project_sees_its_own_runs_and_the_admin_all(
    admin: OffbeatClient, a: OffbeatClient, b: OffbeatClient
) -> None:
    of_a, of_b, of_default = (client.submit(spec_dict()) for client in (a, b, admin))
    assert [run.project for run in (of_a, of_b, of_default)] == ["a", "b", "default"]
    assert [run.id for run in a.iter_runs()] == [of_a.id]
    assert [run.id for run in b.iter_runs()] == [of_b.id]
    assert {run.id for run in admin.iter_runs()} == {of_a.id, of_b.id, of_default.id}
    listed = admin.call("GET", "/v1/runs", params={"project": "b"}).json()["data"]
    assert [run["id"] for run in listed] == [of_b.id]
    assert a.call("GET", "/v1/runs", params={"project": "b"}).json()["data"] == []
    with pytest.raises(NotFoundError, match=f"there is no run '{of_a.id}'"):
        b.cancel(of_a.id)
    assert a.run(of_a.id).status is not RunStatus.CANCELLED


def test_two_projects_may_use_the_same_idempotency_key(a: OffbeatClient, b: OffbeatClient) -> None:
    first, other, again = (client.submit(spec_dict(), "once") for client in (a, b, a))
    assert first.id == again.id != other.id


def test_a_run_starts_from_its_own_projects_runs_alone(
    admin: OffbeatClient, a: OffbeatClient, b: OffbeatClient, store: S3ObjectStore
) -> None:
    source = a.submit(spec_dict()).id
    inside = f"s3://{store.bucket}/runs/{source}/versions/000001-job-1/"
    for lora in ({"init_from": f"{source}@1"}, {"init_from": inside}):
        with pytest.raises(NotFoundError, match=f"there is no run '{source}'"):
            b.submit(spec_dict(lora=lora))
        assert a.submit(spec_dict(lora=lora)).id
        assert admin.submit(spec_dict(lora=lora)).id
    assert b.submit(spec_dict(lora={"init_from": f"s3://elsewhere/runs/{source}/x"})).id


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("runs/{run}/rollouts/job-1-1.parquet", NotFoundError),
        ("runs", NotFoundError),
        ("data/../runs/{run}/rollouts/job-1-1.parquet", InvalidRequestError),
        ("/runs/{run}/rollouts/job-1-1.parquet", InvalidRequestError),
        ("./runs/{run}/rollouts/job-1-1.parquet", InvalidRequestError),
    ],
)
def test_no_data_and_no_model_is_read_from_another_projects_run(
    a: OffbeatClient,
    b: OffbeatClient,
    store: S3ObjectStore,
    key: str,
    error: type[Exception],
) -> None:
    uri = f"s3://{store.bucket}/{key.format(run=a.submit(spec_dict()).id)}"
    data = {"source": "parquet", "uri": uri, "prompt_field": "prompt"}
    for spec in ({**spec_dict(), "data": data}, spec_dict(model={"id": uri})):
        with pytest.raises(error):
            b.submit(spec)


def test_a_projects_key_sees_no_ids_of_others_on_the_workers(
    orchestrator: Orchestrator, admin: OffbeatClient, a: OffbeatClient, b: OffbeatClient
) -> None:
    run_id = a.submit(spec_dict()).id
    served = ServedVersion(run_id=run_id, version=0, adapter_sha256=SHA)
    report = worker().report.model_copy(update={"serving": (served,)})
    orchestrator.worker.report("hand", WorkerReport.model_validate(report.model_dump()))
    lease = Hand(orchestrator).leased(GENERATOR)
    seen = [
        (view.report.serving, view.jobs) for client in (a, admin, b) for view in client.workers()
    ]
    whole = ((served,), (lease.job_id,))
    assert seen == [whole, whole, ((), ())]


def test_only_the_hash_of_a_key_is_kept(orchestrator: Orchestrator, projects: Projects) -> None:
    made = projects.create_key("a", "alice")
    assert made.secret.startswith(f"ofb_{made.key.id.removeprefix('key-')}_")
    with orchestrator.store.read() as session:
        row = session.get_one(KeyRow, made.key.id)
        assert row.secret_sha256 == hashlib.sha256(made.secret.encode()).hexdigest()
    assert list(projects.keys("a")) == [made.key]


def test_a_deleted_key_is_refused_at_once(
    orchestrator: Orchestrator, projects: Projects, a: OffbeatClient
) -> None:
    a.runs()
    (key,) = projects.keys("a")
    with pytest.raises(NotFoundError, match=f"project 'b' has no key '{key.id}'"):
        projects.delete_key("b", key.id)
    projects.delete_key("a", key.id)
    with pytest.raises(UnauthorizedError):
        a.runs()


def test_projects_are_made_once_and_changed_by_the_admin_alone(
    projects: Projects, a: OffbeatClient
) -> None:
    made = projects.create("c", Quotas(active_runs_max=3))
    assert projects.create("c", Quotas(active_runs_max=3)) == made
    with pytest.raises(ConflictError, match="PATCH it"):
        projects.create("c", Quotas(active_runs_max=4))
    changed = projects.change("c", Quotas(jobs_in_flight_max=7)).quotas
    assert changed == Quotas(active_runs_max=3, jobs_in_flight_max=7)
    assert [project.id for project in projects.all()] == ["a", "b", "c", "default"]
    with pytest.raises(NotFoundError, match="there is no project 'd'"):
        projects.create_key("d", "dora")
    as_a = Projects(a)
    assert as_a.show("a").id == "a"
    with pytest.raises(NotFoundError):
        as_a.show("b")
    for forbidden in (
        lambda: as_a.create("mine"),
        lambda: as_a.change("a", Quotas(active_runs_max=9)),
        lambda: as_a.create_key("a", "more"),
        lambda: list(as_a.all()),
    ):
        with pytest.raises(ForbiddenError, match="takes the admin key"):
            forbidden()


def test_a_project_has_no_more_active_runs_than_its_quota(
    projects: Projects, a: OffbeatClient, b: OffbeatClient
) -> None:
    projects.change("a", Quotas(active_runs_max=1))
    first = a.submit(spec_dict(), "first")
    with pytest.raises(QuotaExceededError) as refused:
        a.submit(spec_dict())
    assert refused.value.detail == (
        "project 'a' has 1 active runs of 1 allowed: wait for one to end, cancel one, or have an "
        "administrator raise active_runs_max"
    )
    assert a.submit(spec_dict(), "first").id == first.id
    assert b.submit(spec_dict()).id
    a.cancel(first.id)
    second = a.submit(spec_dict())
    with pytest.raises(QuotaExceededError):
        a.retry(first.id)
    assert a.run(first.id).status is RunStatus.CANCELLED
    a.cancel(second.id)
    assert a.retry(first.id).status is RunStatus.RUNNING
    assert projects.show("a").use.active_runs == 1


def test_requests_at_once_do_not_exceed_a_quota(projects: Projects, a: OffbeatClient) -> None:
    projects.change("a", Quotas(active_runs_max=2))

    def is_taken(_: int) -> bool:
        try:
            a.submit(spec_dict())
        except QuotaExceededError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(is_taken, range(8)))
    assert sorted(taken) == [False] * 6 + [True] * 2


def test_a_run_that_fills_its_projects_store_is_paused(
    orchestrator: Orchestrator, projects: Projects, a: OffbeatClient
) -> None:
    projects.change("a", Quotas(stored_bytes_max=1_000))
    run_id = a.submit(spec_dict()).id
    hand = Hand(orchestrator)
    assert [hand.work(GENERATOR) is None, hand.work(TRAINER) is None] == [False, False]
    assert projects.show("a").use.stored_bytes == 110
    lease = hand.leased(GENERATOR)
    output = plausible_output(lease)
    assert isinstance(output, GenerateOutput)
    request = CompleteRequest(
        attempt=lease.attempt,
        worker_id=hand.worker_id,
        output=output.model_copy(update={"stored_bytes": 890}),
    )
    orchestrator.worker.complete(lease.job_id, request)
    assert a.run(run_id).status is RunStatus.PAUSED
    told = [event for event in a.iter_events(run_id) if event.kind == "quota_exceeded"]
    assert [(event.level, event.data) for event in told] == [
        ("warning", {"stored_bytes": 1_000, "stored_bytes_max": 1_000})
    ]
    for refused in (lambda: a.resume(run_id), lambda: a.submit(spec_dict())):
        with pytest.raises(QuotaExceededError, match=r"has 1,000 bytes .* of 1,000 allowed"):
            refused()
    projects.change("a", Quotas(stored_bytes_max=10_000))
    assert a.resume(run_id).status is RunStatus.RUNNING


def test_a_project_at_its_jobs_in_flight_gives_its_turn_away(
    orchestrator: Orchestrator, projects: Projects, a: OffbeatClient, b: OffbeatClient
) -> None:
    projects.change("a", Quotas(jobs_in_flight_max=1))
    hand = Hand(orchestrator)
    for number in range(3):
        hand.report(GENERATOR, f"generator-{number}")
    of_a = {a.submit(spec_dict()).id for _ in range(2)}
    wait_until(lambda: projects.show("a").use.jobs_in_flight == 1)
    of_b = b.submit(spec_dict()).id
    leases = [hand.leased(GENERATOR), hand.leased(GENERATOR)]
    assert {lease.run_id for lease in leases} - of_a == {of_b}
    assert hand.lease(GENERATOR, wait_s=1) is None
    first = next(lease for lease in leases if lease.run_id in of_a)
    hand.complete(first)
    wait_until(lambda: projects.show("a").use.jobs_in_flight == 1)


def test_a_key_that_asks_too_often_is_told_when_to_come_back(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with (
        running_orchestrator(
            tmp_path, valkey_url, store, api_key=ADMIN_KEY, rate_limit="4/hour"
        ) as running,
        OffbeatClient(running.url, ADMIN_KEY, retry_for_s=0) as admin,
    ):
        key = Projects(admin).create_key("default", "other").secret
        for _ in range(3):
            admin.runs()
        with pytest.raises(RateLimitedError, match="this key may send 4 per 1 hour") as refused:
            admin.runs()
        assert 0 < refused.value.retry_after_s <= 3600
        raw = httpx.get(f"{running.url}/v1/runs", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        assert (raw.status_code, raw.json()["type"]) == (
            429,
            "https://offbeat.dev/problems/rate-limited",
        )
        assert 0 < int(raw.headers["retry-after"]) <= 3600
        with OffbeatClient(running.url, key) as other:
            assert other.runs().data == ()


def test_replicas_count_a_keys_requests_together_in_redis(valkey_url: str) -> None:
    replicas = [RateLimiter("3/hour", valkey_url) for _ in range(2)]
    for number in range(3):
        replicas[number % 2].check("key-shared")
    with pytest.raises(RateLimitedError):
        replicas[1].check("key-shared")
    replicas[0].check("key-other")


def test_a_rate_that_cannot_be_counted_refuses_nobody() -> None:
    unreachable = RateLimiter("1/hour", "redis://127.0.0.1:1/0")
    unreachable.check("key")
    unreachable.check("key")
