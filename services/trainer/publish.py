"""A version on its way out: the files first, the manifest last, and what happens to the loser.

A version is sealed once it is computed: from then on its bytes are known, and the next step may
start from it. Uploading it only waits for the network, beside that next step.

The parts of a trainer process, which steps and publishing share, are here too.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypedDict

import structlog

from offbeat import keys
from offbeat.contracts.jobs import TrainOutput
from offbeat.contracts.leases import Lease
from offbeat.contracts.weights import Canary, Manifest, SkippedStep, VersionFile
from offbeat.errors import WorkerError
from offbeat.objects import S3ObjectStore
from offbeat.tables import ExampleTable
from offbeat.worker import JobContext
from services.trainer import checkpoint
from services.trainer.memory import Memory
from services.trainer.metrics import Metrics, Timer
from services.trainer.policy import Policy
from services.trainer.rollouts import RolloutFetcher
from services.trainer.state import TrainerState
from services.trainer.versions import Versions

log = structlog.get_logger(__name__)

UPLOAD_THREADS = 4
"""One for each file of a version."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The parts of a trainer process."""

    store: S3ObjectStore
    versions: Versions
    rollouts: RolloutFetcher
    examples: Callable[[str], ExampleTable]
    memory: Memory
    parent_wait_s: float = 3600.0
    """How long another trainer may take to hand in the version that a step starts from. Where it is
    lost, the orchestrator takes the step back much earlier."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A step's result."""

    version: int
    state: TrainerState
    make_canary: Callable[[], Canary]
    metrics: Metrics = field(default_factory=Metrics)
    validate: Callable[[], Metrics] = dict
    """More metrics, of a version that is worth publishing: what it does on held-out examples."""
    num_tokens: int = 0
    dropped_group_ids: tuple[str, ...] = ()
    skipped: SkippedStep | None = None


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A version to the last byte, which nobody can see yet."""

    manifest: Manifest
    files: Mapping[str, bytes]
    uploaded: Callable[[], tuple[VersionFile, ...]] = tuple
    """Waits for more files, which are on their way already, and describes them."""


def seal(lease: Lease, policy: Policy, draft: Draft, timer: Timer) -> Sealed:
    """Encode the version and describe it. Raises `WorkerError` for a state that must not be seen.

    The files come first: a canary of weights that are not finite would say nothing.
    """
    spec = lease.spec
    with timer.part("encode"):
        files = checkpoint.encode(draft.state, policy, spec)
    validated = draft.validate()
    with timer.part("canary"):
        canary = draft.make_canary()
    manifest = Manifest(
        **origin(lease, draft.version, files),
        rank=spec.adapter.rank,
        alpha=spec.adapter.alpha,
        use_rslora=spec.adapter.use_rslora,
        target_modules=policy.target_modules,
        canary=canary,
        metrics={**draft.metrics, **validated, **timer.metrics(draft.num_tokens)},
        dropped_group_ids=draft.dropped_group_ids,
        skipped=draft.skipped,
    )
    return Sealed(manifest=manifest, files=files)


class Origin(TypedDict):
    """What a manifest says of every version: whose it is, who made it, and of which files."""

    run_id: str
    version: int
    parent: int | None
    job_id: str
    attempt: int
    prefix: str
    files: tuple[VersionFile, ...]
    base_model: str
    base_revision: str | None


def origin(lease: Lease, version: int, files: Mapping[str, bytes]) -> Origin:
    """Of a version that this job makes."""
    model = lease.spec.model
    return {
        "run_id": lease.run_id,
        "version": version,
        "parent": version - 1 if version else None,
        "job_id": lease.job_id,
        "attempt": lease.attempt,
        "prefix": keys.version_prefix(lease.run_id, version, lease.job_id, lease.attempt),
        "files": checkpoint.describe(files),
        "base_model": model.id,
        "base_revision": model.revision,
    }


def publish(
    context: JobContext, trainer: Trainer, sealed: Sealed, parent: Manifest | None
) -> TrainOutput:
    """Upload the files, then the manifest. Returns the manifest that won.

    Raises `WorkerError` where the parent was not published as the step knew it.
    """
    started_at = time.monotonic()
    manifest = sealed.manifest
    with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        uploads = [
            pool.submit(trainer.store.put, manifest.prefix + name, body)
            for name, body in sealed.files.items()
        ]
        for upload in uploads:
            upload.result()
    files = (*manifest.files, *sealed.uploaded())
    manifest = manifest.model_copy(update={"files": files})
    context.check()
    _refuse_orphan(trainer, manifest, parent)
    winner = trainer.versions.publish(manifest)
    if winner != manifest:
        log.info("Another trainer published the version first.", version=manifest.version)
    publish_s = time.monotonic() - started_at
    log.info("The version is published.", version=manifest.version, publish_s=round(publish_s, 2))
    return TrainOutput(manifest=winner, publish_s=publish_s)


def _refuse_orphan(trainer: Trainer, manifest: Manifest, parent: Manifest | None) -> None:
    """The step may have begun while its parent was still being handed in, and that may fail."""
    if parent is None:
        return
    published = trainer.versions.get(manifest.run_id, parent.version)
    if published is None or not published.agrees_with(parent):
        raise WorkerError(
            f"version {manifest.version} was computed from a version {parent.version} that was "
            "not published: the step is taken again"
        )
