"""A worker's file by which health checks see that it lives."""

from pathlib import Path

from offbeat.contracts.jobs import WorkerRole
from offbeat.presence import ALIVE_FILE, Presence
from offbeat.worker_api import OrchestratorClient
from scripts.parts import free_port
from tests.waiting import wait_until


def test_the_file_is_written_whether_the_orchestrator_answers_or_not(tmp_path: Path) -> None:
    nobody = OrchestratorClient(f"http://127.0.0.1:{free_port()}", None)
    folder = tmp_path / "not" / "there"
    presence = Presence(
        nobody, "trainer-1", WorkerRole.TRAINER, "default", "torch", data_dir=folder
    )
    presence.start()
    try:
        wait_until((folder / ALIVE_FILE).exists)
    finally:
        presence.stop()
