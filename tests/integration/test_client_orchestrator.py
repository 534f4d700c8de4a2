"""The client against the real orchestrator: what one asks for and the other answers is the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.runs import MetricPoint, RunStatus
from offbeat.errors import ConflictError, InvalidRequestError, NotFoundError
from offbeat.objects import S3ObjectStore
from tests.orchestrator import Hand, Orchestrator, running_orchestrator
from tests.specs import spec_dict

GENERATOR, TRAINER = WorkerRole.GENERATOR, WorkerRole.TRAINER


@pytest.fixture
def orchestrator(tmp_path: Path, empty_broker: str, store: S3ObjectStore) -> Iterator[Orchestrator]:
    with running_orchestrator(tmp_path, empty_broker, store) as running:
        yield running


@pytest.fixture
def client(orchestrator: Orchestrator) -> Iterator[OffbeatClient]:
    with OffbeatClient(orchestrator.url) as client:
        yield client


def test_a_run_is_followed_from_submission_to_its_end(
    orchestrator: Orchestrator, client: OffbeatClient
) -> None:
    run, again = (client.submit(spec_dict(train={"steps": 1}), "once") for _ in range(2))
    assert run.id == again.id
    hand = Hand(orchestrator)
    hand.report(GENERATOR)
    for role in (GENERATOR, TRAINER, GENERATOR, TRAINER):
        assert hand.work(role) is not None
    kinds = [event.kind for event in client.stream_events(run.id)]
    assert kinds[0] == "run_created"
    assert kinds[-1] == "run_succeeded"
    assert [event.kind for event in client.iter_events(run.id)] == kinds
    assert [event.kind for event in client.events(run.id, limit=2).data] == kinds[:2]
    assert client.wait(run.id).status is RunStatus.SUCCEEDED
    assert client.metrics(run.id, ["reward"]).series == {
        "reward": (MetricPoint(step=1, value=0.25),)
    }
    assert [checkpoint.version for checkpoint in client.checkpoints(run.id)] == [0, 1]
    assert [worker.id for worker in client.workers()] == ["hand-generator"]
    assert client.diagnosis(run.id).verdict.startswith("The run is succeeded")
    assert client.rollouts(run.id, split="eval", min_reward=0.5, version=1).data == ()


def test_runs_are_listed_and_steered(client: OffbeatClient) -> None:
    ids = [client.submit(spec_dict()).id for _ in range(3)]
    assert [run.id for run in client.iter_runs()] == ids[::-1]
    page = client.runs(limit=2)
    assert [run.id for run in page.data] == ids[:0:-1]
    assert [run.id for run in client.runs(limit=2, after=page.next_cursor).data] == ids[:1]
    assert client.pause(ids[0]).status is RunStatus.PAUSED
    assert client.resume(ids[0]).status is RunStatus.RUNNING
    assert client.cancel(ids[0]).status is RunStatus.CANCELLED
    with pytest.raises(ConflictError, match="a run that is cancelled cannot pause"):
        client.pause(ids[0])
    assert client.retry(ids[0]).status is RunStatus.RUNNING
    assert [run.id for run in client.runs(RunStatus.CANCELLED).data] == []


def test_refusals_arrive_as_errors_of_the_tree(client: OffbeatClient, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no run 'run-x'"):
        client.run("run-x")
    with pytest.raises(InvalidRequestError):
        client.runs(limit=10_000)
    run = client.submit(spec_dict())
    with pytest.raises(NotFoundError):
        client.download_adapter(run.id, tmp_path / "adapter", version=7)
