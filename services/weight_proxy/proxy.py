"""What the weight-proxy does with its parts: how a version becomes visible.

    manifest alone -> objects in the store -> bytes and shapes of the adapter -> one insert

Everything before the insert may be repeated or abandoned without a trace; the insert decides.
"""

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader

import structlog
from anyio import CapacityLimiter, to_thread
from cachetools import LRUCache

from offbeat import keys
from offbeat.contracts.weights import (
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    Manifest,
    PublishedVersion,
    VersionFile,
)
from offbeat.errors import (
    ConflictError,
    GoneError,
    IntegrityError,
    InvalidRequestError,
    NotFoundError,
    ObjectNotFoundError,
)
from offbeat.objects import S3ObjectStore, check_size
from services.weight_proxy.adapter import Shape, check_manifest, check_shapes, read_shapes
from services.weight_proxy.cache import FileCache
from services.weight_proxy.metrics import Metrics
from services.weight_proxy.registry import Registry
from services.weight_proxy.waiters import Waiters

log = structlog.get_logger(__name__)

STORE_CALLS_MAX = 16
"""Calls of publishers to the store at a time: while it hangs, readers still get a thread."""

TENSORS_REMEMBERED = 100_000
"""Whose shapes need not be read again: some 20 MB, or the adapters of ninety runs on a 70B model.
"""


@dataclass(frozen=True, kw_only=True)
class WeightProxy:
    """The parts of the service, and what takes more than one of them."""

    registry: Registry
    store: S3ObjectStore
    cache: FileCache
    waiters: Waiters
    metrics: Metrics
    shapes: LRUCache[str, dict[str, Shape]] = field(
        default_factory=lambda: LRUCache(TENSORS_REMEMBERED, getsizeof=len)
    )
    """Of the adapters that were published last, by their hash."""
    store_limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(STORE_CALLS_MAX))

    async def publish(
        self, run_id: str, version: int, manifest: Manifest
    ) -> tuple[PublishedVersion, bool]:
        """The stored version, and whether this call made it visible.

        Raises `InvalidRequestError` where the manifest or what it describes is not whole,
        `ConflictError` where another manifest won or the parent is not published.
        """
        check_manifest(manifest, run_id, version)
        winner = await self._find(run_id, version)
        is_new = False
        if winner is None:
            with self.metrics.verify_s.time():
                await self._verify(manifest)
            candidate = PublishedVersion(manifest=manifest, published_at=datetime.now(UTC))
            winner = await to_thread.run_sync(self.registry.publish, candidate)
            is_new = winner is candidate
        if winner.manifest != manifest:
            self.metrics.conflicts.inc()
            raise ConflictError(
                f"version {version} was published by job {winner.manifest.job_id} attempt "
                f"{winner.manifest.attempt}: go on from that one"
            )
        if is_new:
            self.metrics.publishes.inc()
            self.waiters.announce(winner)
            log.info("A version was published.", run=run_id, version=version)
        # Also on a repeat: the first answer may have been lost before this write.
        key, body = keys.manifest(run_id, version), winner.model_dump_json().encode()
        await to_thread.run_sync(self.store.put, key, body, limiter=self.store_limiter)
        return winner, is_new

    async def published(self, run_id: str, version: int) -> PublishedVersion:
        """One version. `NotFoundError` where it is not published."""
        published = await self._find(run_id, version)
        if published is None:
            raise NotFoundError(f"run {run_id!r} has no version {version}")
        return published

    async def open_file(self, manifest: Manifest, name: str) -> tuple[VersionFile, BufferedReader]:
        """A file of a version, verified and open.

        `NotFoundError` where the manifest lacks it, `GoneError` where it was removed since.
        """
        try:
            file = manifest.file(name)
        except KeyError as error:
            raise NotFoundError(f"version {manifest.version} has no file {name!r}") from error
        try:
            return file, await self.cache.open(manifest.prefix + name, file)
        except ObjectNotFoundError as error:
            raise GoneError(
                f"{name!r} of version {manifest.version} was there when it was published and is "
                "not any more: the run's retention has given it up"
            ) from error

    async def _find(self, run_id: str, version: int) -> PublishedVersion | None:
        known = self.registry.remembered(run_id, version)
        return known or await to_thread.run_sync(self.registry.get, run_id, version)

    async def _verify(self, manifest: Manifest) -> None:
        parent = await self._parent(manifest)
        await asyncio.gather(*(self._check_file(manifest, file) for file in manifest.files))
        if parent is not None and parent.has_adapter != manifest.has_adapter:
            raise InvalidRequestError(
                "a version has an adapter where its parent has one, and there alone"
            )
        if manifest.rank is not None:
            parent_shapes = await self._shapes(parent) if parent else None
            check_shapes(await self._shapes(manifest), manifest.rank, parent_shapes)

    async def _parent(self, manifest: Manifest) -> Manifest | None:
        if manifest.parent is None:
            return None
        parent = await self._find(manifest.run_id, manifest.parent)
        if parent is None:
            raise ConflictError(
                f"the parent, version {manifest.parent}, is not published: publish it first"
            )
        return parent.manifest

    async def _check_file(self, manifest: Manifest, file: VersionFile) -> None:
        """The bytes of what generators pull; of all else the size."""
        key = manifest.prefix + file.name
        try:
            if file.name in ADAPTER_FILES:
                await self.cache.fetch(key, file)
            else:
                await to_thread.run_sync(
                    check_size, self.store, key, file.size_bytes, limiter=self.store_limiter
                )
        except ObjectNotFoundError as error:
            raise InvalidRequestError(f"{error.detail}: upload it before the manifest") from error
        except IntegrityError as error:
            raise InvalidRequestError(f"{error.detail}: upload the file again") from error

    async def _shapes(self, manifest: Manifest) -> dict[str, Shape]:
        """Those of the version's adapter. They are remembered: most are soon a child's to have."""
        known = self.shapes.get(manifest.adapter_sha256)
        if known is None:
            file, opened = await self.open_file(manifest, ADAPTER_WEIGHTS)
            with opened:
                known = await to_thread.run_sync(read_shapes, opened, file.size_bytes)
            if len(known) <= TENSORS_REMEMBERED:
                self.shapes[manifest.adapter_sha256] = known
        return known
