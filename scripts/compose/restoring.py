"""A backup is one only if it can be put back."""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory

from offbeat.contracts.weights import ADAPTER_WEIGHTS
from scripts.compose.commands import ComposeTestError
from scripts.compose.stack import ComposeStack


def check_restored(stack: ComposeStack, run_id: str, folder: Path) -> None:
    """Back up, throw everything away, restore: the run and its adapter are what they were."""
    before = _state(stack, run_id)
    print("backing up …", flush=True)
    stack.commands.run("deploy/compose/backup.sh", str(folder))
    print("removing everything …", flush=True)
    stack.down()
    print("restoring …", flush=True)
    stack.commands.run("deploy/compose/restore.sh", str(folder))
    stack.up()
    after = _state(stack, run_id)
    if after != before:
        raise ComposeTestError(f"restored {after}, which was {before}")


def _state(stack: ComposeStack, run_id: str) -> tuple[str, int, str]:
    """Status, number of metrics and hash of the adapter."""
    with stack.client() as client, TemporaryDirectory() as folder:
        run = client.run(run_id)
        series = client.metrics(run_id).series
        client.download_adapter(run_id, Path(folder, "adapter"))
        adapter = Path(folder, "adapter", ADAPTER_WEIGHTS).read_bytes()
    points = sum(len(values) for values in series.values())
    return run.status, points, hashlib.sha256(adapter).hexdigest()
