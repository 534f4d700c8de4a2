"""How a worker runs its jobs: in a thread of the process that holds the model."""

import importlib
from pathlib import Path

import redis
import torch

from offbeat.objects import S3ObjectStore
from tests.fleet import running_fleet
from tests.orchestrator import GENERATOR, running_orchestrator, submit
from tests.waiting import wait_until


def test_x4_no_worker_touches_cuda_when_it_is_imported() -> None:
    was_in_use = torch.cuda.is_initialized()
    for role in ("generator", "trainer"):
        importlib.import_module(f"services.{role}.__main__")
    assert torch.cuda.is_initialized() == was_in_use


def test_x4_a_worker_has_no_forked_children(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    with (
        running_orchestrator(tmp_path, valkey_url, store) as orchestrator,
        running_fleet(orchestrator, valkey_url, tmp_path) as fleet,
    ):
        fleet.start(GENERATOR, "g1", "--job-s", "600", grace_s=0.0)
        submit(orchestrator.worker.http)
        wait_until(lambda: len(fleet.holding("g1")) == 1)
        tasks = Path(f"/proc/{fleet.processes['g1'].pid}/task")
        assert [pid for task in tasks.iterdir() for pid in _children(task)] == []


def _children(task: Path) -> list[str]:
    return (task / "children").read_text().split()
