"""The version that a step starts from, and the trainer's state at it.

It is the newest one, and may not be visible yet: this process has just sealed it and uploads it
beside the step, or another trainer does. If there is a newer one, the step has been taken.
"""

import time

import structlog

from offbeat.contracts.weights import Manifest
from offbeat.errors import WorkerError
from offbeat.worker import JobContext
from services.trainer import checkpoint
from services.trainer.policy import Policy
from services.trainer.publish import Trainer
from services.trainer.state import TrainerState

log = structlog.get_logger(__name__)

POLL_WAIT_S = 5.0


def parent_or_next(context: JobContext, trainer: Trainer, version: int) -> Manifest:
    """The version to start from, or the next one where the step has been taken.

    Raises `WorkerError` where nobody publishes the former in time.
    """
    run_id = context.lease.run_id
    if newest := trainer.versions.newest(run_id, version - 1):
        return published_version(trainer, run_id, min(newest.version, version + 1))
    if sealed := trainer.memory.sealed(run_id, version):
        return sealed
    log.info("Waiting for the version to start from.", version=version)
    deadline = time.monotonic() + trainer.parent_wait_s
    while time.monotonic() < deadline:
        context.check()
        if trainer.versions.newest(run_id, version - 1, POLL_WAIT_S):
            break
    return published_version(trainer, run_id, version)


def published_version(trainer: Trainer, run_id: str, version: int) -> Manifest:
    """The manifest of a version that everybody can see."""
    manifest = trainer.versions.get(run_id, version)
    if manifest is None:
        raise WorkerError(f"version {version} of run {run_id!r} is not published")
    return manifest


def stored_state(trainer: Trainer, policy: Policy, manifest: Manifest) -> TrainerState:
    """The state of a published version, from the store."""
    files = checkpoint.download(trainer.store, manifest, checkpoint.STATE_FILES)
    log.info("Loaded the trainer's state.", version=manifest.version)
    return checkpoint.decode(files, policy)
