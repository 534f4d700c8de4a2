"""A version on its way out: the files first, the manifest last, and what happens to the loser.

The parts of a trainer process, which steps and publishing share, are here too.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog

from offbeat import keys
from offbeat.contracts.weights import Canary, Manifest, SkippedStep
from offbeat.objects import S3ObjectStore
from offbeat.worker import JobContext
from offbeat.worker_api import VersionTakenError, WeightProxyClient
from services.trainer import checkpoint
from services.trainer.memory import Memory
from services.trainer.metrics import Metrics, Timer
from services.trainer.model import Policy
from services.trainer.state import TrainerState

log = structlog.get_logger(__name__)

UPLOAD_THREADS = 4
"""One for each file of a version."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The parts of a trainer process."""

    store: S3ObjectStore
    proxy: WeightProxyClient
    published_hash: Callable[[str, int], str | None]
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A version that is not published yet."""

    version: int
    state: TrainerState
    make_canary: Callable[[], Canary]
    metrics: Metrics = field(default_factory=Metrics)
    num_tokens: int = 0
    dropped_group_ids: tuple[str, ...] = ()
    skipped: SkippedStep | None = None


def publish(
    context: JobContext, trainer: Trainer, policy: Policy, draft: Draft, timer: Timer
) -> Manifest:
    """Upload the files, then the manifest. Returns the manifest that won.

    The upload waits on the network while the canary computes.
    """
    lease, spec = context.lease, context.lease.spec
    prefix = keys.version_prefix(lease.run_id, draft.version, lease.job_id, lease.attempt)
    with timer.part("publish"), ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        files = checkpoint.encode(draft.state, policy, spec)
        uploads = [pool.submit(trainer.store.put, prefix + name, files[name]) for name in files]
        canary = draft.make_canary()
        for upload in uploads:
            upload.result()
    manifest = Manifest(
        run_id=lease.run_id,
        version=draft.version,
        parent=draft.version - 1 if draft.version else None,
        job_id=lease.job_id,
        attempt=lease.attempt,
        prefix=prefix,
        files=checkpoint.describe(files),
        base_model=spec.model.id,
        base_revision=spec.model.revision,
        rank=spec.lora.rank,
        alpha=spec.lora.alpha,
        target_modules=policy.target_modules,
        canary=canary,
        metrics={**draft.metrics, **timer.metrics(draft.num_tokens)},
        dropped_group_ids=draft.dropped_group_ids,
        skipped=draft.skipped,
    )
    context.check()
    try:
        published = trainer.proxy.publish(manifest)
    except VersionTakenError as taken:
        log.info("Another trainer published the version first: adopted it.", version=draft.version)
        return taken.winner.manifest
    trainer.memory.keep(published.manifest, draft.state)
    log.info("Published a version.", version=draft.version, step_s=round(timer.total_s(), 2))
    return published.manifest
