import json
import socket
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi import FastAPI

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import CheckpointView, MetricPoint, RunStatus
from offbeat.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
)
from offbeat.specs import InvalidSpecError
from tests import run_views
from tests.integration.fake_orchestrator import ADAPTER, FakeOrchestrator
from tests.servers import serve

RUN_ID = "run-00000000a1"


@pytest.fixture
def fake() -> FakeOrchestrator:
    return FakeOrchestrator(runs=[run_views.run(RUN_ID)])


@pytest.fixture
def client(fake: FakeOrchestrator) -> Iterator[OffbeatClient]:
    with serve(fake.app()) as url, OffbeatClient(url) as client:
        yield client


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_sample_of_the_readme_reads_rewards(
    fake: FakeOrchestrator, client: OffbeatClient, tmp_path: Path
) -> None:
    fake.metrics = {"reward": [0.25, 0.5], "loss": [1.0, 0.5]}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(run_views.SPEC))
    fake.ends_as = RunStatus.SUCCEEDED
    run = client.submit(str(path))
    fake.replace(run_views.run(run.id, step=39))
    assert client.wait(run.id).status is RunStatus.SUCCEEDED
    points = client.metrics(run.id, ["reward"]).series["reward"]
    assert points == (MetricPoint(step=1, value=0.25), MetricPoint(step=2, value=0.5))
    assert set(client.metrics(run.id).series) == {"reward", "loss"}


def test_every_submission_makes_a_run_unless_its_key_was_used(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    first = client.submit(run_views.SPEC)
    second = client.submit(run_views.spec())
    assert first.id != second.id
    assert len(fake.ids_by_key) == 2
    again = [client.submit(run_views.SPEC, idempotency_key="mine").id for _ in range(2)]
    assert again[0] == again[1]


def test_a_submission_that_is_tried_again_makes_one_run(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    fake.refusals = 2
    client.submit(run_views.SPEC)
    keys = {request.headers["idempotency-key"] for request in fake.requests}
    assert len(fake.requests) == 3
    assert keys == set(fake.ids_by_key)


def test_an_invalid_spec_is_refused_before_anything_is_sent(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    with pytest.raises(InvalidSpecError, match=r"^train\.steps: missing; it has no default$"):
        client.submit({**run_views.SPEC, "train": {}})
    assert fake.requests == []


def test_a_service_that_is_not_there_is_unavailable() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    with (
        OffbeatClient(url, retry_for_s=0) as client,
        pytest.raises(UnavailableError, match=rf"^{url}/? does not answer: ConnectError"),
    ):
        client.run(RUN_ID)


def test_another_service_at_the_address_is_named_as_such() -> None:
    app = FastAPI()
    app.get("/v1/runs/{run_id}")(lambda run_id: {"hello": "world"})
    with (
        serve(app) as url,
        OffbeatClient(url) as client,
        pytest.raises(UnavailableError, match="does not answer like an Offbeat orchestrator"),
    ):
        client.run(RUN_ID)


def test_an_address_without_scheme_is_refused_with_the_form_it_needs() -> None:
    with pytest.raises(InvalidRequestError, match="write http://host:port"):
        OffbeatClient("localhost:8000")


def test_address_and_key_come_from_the_environment(
    fake: FakeOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.api_key = "secret"
    with serve(fake.app()) as url:
        monkeypatch.setenv("OFFBEAT_URL", url)
        with OffbeatClient() as client, pytest.raises(UnauthorizedError):
            client.run(RUN_ID)
        monkeypatch.setenv("OFFBEAT_API_KEY", "secret")
        with OffbeatClient() as client:
            assert client.run(RUN_ID) == fake.runs[0]


def test_actions_return_the_changed_run_or_say_why_not(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    assert client.pause(RUN_ID).status is RunStatus.PAUSED
    assert client.resume(RUN_ID).status is RunStatus.RUNNING
    assert client.cancel(RUN_ID).status is RunStatus.CANCELLED
    with pytest.raises(ConflictError, match="a run that is cancelled cannot pause"):
        client.pause(RUN_ID)
    assert client.retry(RUN_ID).status is RunStatus.RUNNING
    with pytest.raises(NotFoundError, match="there is no run 'run-x'"):
        client.pause("run-x")


def test_lists_are_read_page_by_page(fake: FakeOrchestrator, client: OffbeatClient) -> None:
    fake.runs = [run_views.run(f"run-{index:010x}") for index in range(450)]
    fake.runs[7] = run_views.run("run-paused", status=RunStatus.PAUSED)
    first = client.runs(limit=2)
    assert [run.id for run in first.data] == ["run-0000000000", "run-0000000001"]
    second = client.runs(limit=2, after=first.next_cursor)
    assert [run.id for run in second.data] == ["run-0000000002", "run-0000000003"]
    assert list(client.iter_runs()) == fake.runs
    assert [run.id for run in client.iter_runs(RunStatus.PAUSED)] == ["run-paused"]


def test_samples_are_filtered_by_the_service(fake: FakeOrchestrator, client: OffbeatClient) -> None:
    fake.rollouts = [run_views.rollout(n, reward=n / 4) for n in range(4)]
    page = client.rollouts(RUN_ID, min_reward=0.5, version=3, after="2")
    assert page.data == tuple(fake.rollouts[2:])
    client.rollouts(RUN_ID, step=4, max_reward=0.5, split="eval", limit=7)
    query = dict(fake.requests[-1].query_params)
    assert query == {"step": "4", "max_reward": "0.5", "split": "eval", "limit": "7"}


def test_checkpoints_workers_and_the_diagnosis_are_read(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    fake.checkpoints = [
        CheckpointView(
            version=version,
            step=version,
            adapter_sha256="0" * 64,
            size_bytes=7,
            prefix=f"runs/{RUN_ID}/versions/{version:06d}-j-1/",
            published_at=run_views.CREATED_AT + timedelta(seconds=version),
            metrics={"reward": 0.5},
        )
        for version in range(201)
    ]
    fake.workers = [run_views.worker()]
    assert client.checkpoints(RUN_ID) == tuple(fake.checkpoints)
    assert client.workers() == tuple(fake.workers)
    diagnosis = client.diagnosis(RUN_ID)
    assert (diagnosis.verdict, diagnosis.details) == ("Generation-bound.", {"generators_alive": 1})


def test_an_event_stream_that_breaks_off_is_taken_up_after_the_last_event(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    fake.events = [run_views.event(number, f"Event {number}.") for number in range(1, 8)]
    fake.stream_breaks_after = 3
    fake.ends_as = RunStatus.SUCCEEDED
    fake.replace(run_views.run(RUN_ID, step=36))
    assert list(client.stream_events(RUN_ID, after=1)) == fake.events[1:]
    streams = [r for r in fake.requests if r.headers["accept"] == "text/event-stream"]
    assert [stream.headers["last-event-id"] for stream in streams] == ["1", "4", "7"]


def test_an_event_stream_outlives_a_restart_of_the_service(fake: FakeOrchestrator) -> None:
    fake.events = [run_views.event(1, "First.")]
    port = closed_port()
    with serve(fake.app(), port) as url:
        client = OffbeatClient(url, retry_for_s=0)
        stream = client.stream_events(RUN_ID)
        assert next(stream).message == "First."
    fake.events.append(run_views.event(2, "Second."))
    fake.replace(run_views.run(RUN_ID, step=40, status=RunStatus.SUCCEEDED))
    with serve(fake.app(), port):
        assert [event.message for event in stream] == ["Second."]
    client.close()


def test_waiting_for_a_run_ends_with_it_or_at_the_timeout(
    fake: FakeOrchestrator, client: OffbeatClient
) -> None:
    with pytest.raises(TimeoutError, match=f"{RUN_ID} is still running after 0 s"):
        client.wait(RUN_ID, timeout_s=0)
    fake.replace(run_views.run(RUN_ID, status=RunStatus.FAILED))
    assert client.wait(RUN_ID).status is RunStatus.FAILED


def test_an_adapter_is_saved_as_a_zip_or_as_a_folder(
    fake: FakeOrchestrator, client: OffbeatClient, tmp_path: Path
) -> None:
    client.download_adapter(RUN_ID, tmp_path / "new" / "adapter.zip", version=3)
    assert fake.requests[-1].query_params["version"] == "3"
    with zipfile.ZipFile(tmp_path / "new" / "adapter.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == ADAPTER
    client.download_adapter(RUN_ID, f"{tmp_path}/folder")
    files = {path.name: path.read_bytes() for path in (tmp_path / "folder").iterdir()}
    assert files == ADAPTER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]


def test_an_adapter_that_is_not_there_leaves_nothing_behind(
    client: OffbeatClient, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="there is no version 99"):
        client.download_adapter(RUN_ID, tmp_path / "folder", version=99)
    assert list(tmp_path.iterdir()) == []
