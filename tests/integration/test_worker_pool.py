"""How a worker runs its jobs: in a thread of the process that holds the model."""

import subprocess
import sys
from pathlib import Path

import psutil

from offbeat.objects import S3ObjectStore
from tests.fleet import running_fleet
from tests.orchestrator import GENERATOR, running_orchestrator, submit
from tests.waiting import wait_until

IMPORT_BOTH = """
import importlib, torch
for role in ("generator", "trainer"):
    importlib.import_module(f"services.{role}.__main__")
assert not torch.cuda.is_initialized()
"""


def test_x4_no_worker_touches_cuda_when_it_is_imported() -> None:
    """In a fresh interpreter, in which no other test has used it."""
    subprocess.run([sys.executable, "-c", IMPORT_BOTH], check=True, timeout=300)


def test_x4_a_worker_has_no_forked_children(
    tmp_path: Path, empty_broker: str, store: S3ObjectStore
) -> None:
    with (
        running_orchestrator(tmp_path, empty_broker, store) as orchestrator,
        running_fleet(orchestrator, empty_broker, tmp_path) as fleet,
    ):
        fleet.start(GENERATOR, "g1", "--job-s", "600", grace_s=0.0)
        submit(orchestrator.worker.http)
        wait_until(lambda: len(fleet.holding("g1")) == 1)
        assert psutil.Process(fleet.processes["g1"].pid).children() == []
