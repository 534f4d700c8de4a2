"""The policy versions of one run on one engine: followed, pulled, proved, lent out.

    weight-proxy -> pull -> load -> prove -> lend to jobs -> drop

A thread waits for newer versions and makes each ready beside the work that is under way. A version
exists for jobs only once it is proved, and again after an engine was restarted. A job keeps the
version it began with; a version is dropped when it is superseded and no job holds it, never by its
age.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import structlog

from offbeat import keys
from offbeat.canary import CanaryVerdict
from offbeat.contracts.leases import EVENT_CHARS_MAX, ServedVersion, WorkerEvent
from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import ADAPTER_FILES, Canary, Manifest, PublishedVersion
from offbeat.errors import IntegrityError, OffbeatError, OutageError, UnavailableError
from offbeat.worker_api import WeightProxyClient
from services.generator.engines.base import Engine, never_cancelled
from services.generator.proof import check_manifest, prove
from services.generator.pull import pull
from services.generator.shelf import Policy, Shelf

log = structlog.get_logger(__name__)

POLL_WAIT_S = 20.0
"""One long-poll; also how soon the thread notices that the run is idle."""
RETRY_PAUSE_S = 1.0
"""Between two tries of a pull, or two polls of a proxy that does not answer."""
ACQUIRE_TIMEOUT_S = 120.0
"""How long a job waits for a version before it goes back to the queue."""
RUN_IDLE_S = 600.0
"""A run without jobs for so long is followed no more, and its adapters are unloaded."""


class RunPolicies:
    """See the module. Every method may be called from any thread."""

    def __init__(
        self,
        run_id: str,
        *,
        engine: Engine,
        model: ModelSection,
        proxy: WeightProxyClient,
        tell: Callable[[WorkerEvent], None],
        folder: Path,
        spare_max: int,
    ) -> None:
        self._run_id = run_id
        self._engine = engine
        self._model = model
        self._proxy = proxy
        self._tell = tell
        self._folder = folder
        self._shelf = Shelf(spare_max, lambda policy: self._discard(policy.name, policy.folder))
        self._left: dict[str, Path] = {}
        """Folders of adapters whose unloading the engine has not acknowledged."""
        self._pulled: dict[str, Path] = {}
        """The files of the version that was pulled last, by their hash."""
        self._seen = -1
        """The newest version that was looked at, proved or refused."""
        self._refusal = "none was published"
        """Why there is no newer version, for a job that waits in vain."""
        self._outage: OutageError | None = None
        """Why the weight-proxy could not be asked, or not be read from, when it was tried last."""
        self._started_at = datetime.now(UTC)

    def start(self) -> None:
        """Follow the run, in a thread of its own, until it is closed or idle."""
        name = f"follow-{self._run_id}"
        threading.Thread(target=self._follow, name=name, daemon=True).start()

    def touch(self) -> bool:
        """Keep the run from being idle for a while; false where it is closed already."""
        return self._shelf.touch()

    def idle_s(self) -> float:
        """How long no job has used the run; 0 while one does."""
        return self._shelf.idle_s()

    def close(self) -> None:
        """Follow the run no more; what jobs still hold is dropped when they are done."""
        self._shelf.close()

    def serving(self) -> tuple[ServedVersion, ...]:
        """The versions that jobs may use now."""
        return tuple(
            ServedVersion(
                run_id=self._run_id, version=policy.version, adapter_sha256=policy.adapter_sha256
            )
            for policy in self._shelf.policies()
        )

    @contextmanager
    def newest(
        self,
        min_version: int,
        *,
        check: Callable[[], None] = never_cancelled,
        timeout_s: float = ACQUIRE_TIMEOUT_S,
    ) -> Iterator[Policy]:
        """The newest version at hand, held until the end of the block.

        Waits for one that is at least `min_version`; `UnavailableError` after the timeout, an
        `OutageError` where the weight-proxy is away.
        """
        # An engine that is still starting does not count as a late version.
        self._engine.loaded(check=check)
        policy = self._shelf.lend_newest(min_version, check, timeout_s)
        if policy is None:
            kind = OutageError if self._outage else UnavailableError
            raise kind(
                f"version {min_version} of {self._run_id} is not at hand after {timeout_s:.0f} s "
                f"(newest seen: {self._seen}): {self._outage or self._refusal}"
            )
        with self._lent(policy, check):
            yield policy

    @contextmanager
    def exact(
        self, version: int, *, check: Callable[[], None] = never_cancelled
    ) -> Iterator[Policy]:
        """This very version, pulled and proved now where it is not at hand."""
        policy = self._shelf.lend(version)
        if policy is None:
            # Adopting cannot be cancelled while it waits for an engine that is starting.
            self._engine.loaded(check=check)
            published = self._proxy.version(self._run_id, version)
            if published is None:
                raise UnavailableError(f"version {version} of {self._run_id} is not published")
            policy = self._adopt(published)
        with self._lent(policy, check):
            yield policy

    @contextmanager
    def _lent(self, policy: Policy, check: Callable[[], None]) -> Iterator[None]:
        try:
            self._load_if_lost(policy, check)
            yield
        finally:
            self._shelf.touch()
            self._shelf.give_back(policy)

    # -- following -----------------------------------------------------------------------------

    def _follow(self) -> None:
        with structlog.contextvars.bound_contextvars(run=self._run_id):
            while not self._shelf.closed:
                try:
                    self._look_for_newer()
                    self._outage = None
                except Exception as error:
                    if self._shelf.closed:
                        break
                    self._outage = error if isinstance(error, OutageError) else None
                    expected = isinstance(error, OffbeatError)
                    log.warning(
                        "A newer version is not ready.",
                        error=str(error),
                        exc_info=None if expected else error,
                    )
                    self._shelf.pause(RETRY_PAUSE_S)
                if self.idle_s() > RUN_IDLE_S:
                    self.close()
            log.info("The run is followed no more.")

    def _look_for_newer(self) -> None:
        published = self._proxy.wait_for_newer(self._run_id, self._seen, POLL_WAIT_S)
        if published is None or self._shelf.closed:
            return
        version = published.manifest.version
        try:
            self._shelf.give_back(self._adopt(published))
        except IntegrityError as error:
            self._refusal = f"version {version} was refused, {error.detail}"
        self._seen = version

    def _adopt(self, published: PublishedVersion) -> Policy:
        """Make a version ready for use and lend it to the caller.

        `UnavailableError` where trying again may help, `IntegrityError` where it cannot.
        """
        manifest = published.manifest
        name = keys.adapter_name(self._run_id, manifest.version)
        with self._shelf.exclusive(name):
            ready = self._shelf.lend(manifest.version)
            if ready is not None:
                return ready
            started_at = time.monotonic()
            if name in self._left:
                self._discard(name, self._left.pop(name))
            folder = pull(self._proxy, manifest, self._folder, self._pulled)
            self._pulled = {manifest.file(name).sha256: folder / name for name in ADAPTER_FILES}
            try:
                pulled_at = time.monotonic()
                check_manifest(manifest, self._model, folder)
                self._load(name, folder)
                loaded_at = time.monotonic()
                verdict = self._prove(name, manifest.proof)
                policy = Policy(
                    name=name,
                    version=manifest.version,
                    adapter_sha256=manifest.adapter_sha256,
                    folder=folder,
                    canary=manifest.proof,
                )
                self._shelf.add(policy)
            except Exception as error:
                self._discard(name, folder)
                if isinstance(error, IntegrityError):
                    self._report_refusal(manifest, error)
                raise
        self._report_served(
            published,
            verdict,
            download_s=pulled_at - started_at,
            load_s=loaded_at - pulled_at,
            canary_s=time.monotonic() - loaded_at,
        )
        return policy

    def _load(self, name: str, folder: Path) -> None:
        self._engine.load(name, folder)
        if name not in self._engine.loaded():
            raise UnavailableError(f"the engine took {name} but does not list it")

    def _prove(self, name: str, canary: Canary) -> CanaryVerdict:
        verdict = prove(self._engine, name, canary, self._model)
        if not verdict.ok:
            raise IntegrityError(verdict.reason)
        return verdict

    def _load_if_lost(self, policy: Policy, check: Callable[[], None]) -> None:
        """Make a version ready again that a restarted engine does not know any more."""
        with self._shelf.exclusive(policy.name):
            if policy.name in self._engine.loaded(check=check):
                return
            self._load(policy.name, policy.folder)
            try:
                self._prove(policy.name, policy.canary)
            except OffbeatError:
                self._engine.unload(policy.name)
                raise
        log.info("A version is served again.", version=policy.version)

    def _discard(self, name: str, folder: Path) -> None:
        """The folder goes last: an engine may read it until it has unloaded the adapter."""
        try:
            self._engine.unload(name)
        except UnavailableError as error:
            log.warning("An adapter may still be loaded: its files stay.", error=error.detail)
            self._left[name] = folder
            return
        shutil.rmtree(folder, ignore_errors=True)

    # -- reporting -----------------------------------------------------------------------------

    def _report_served(
        self, published: PublishedVersion, verdict: CanaryVerdict, **seconds: float
    ) -> None:
        manifest = published.manifest
        # A version from before this generator followed the run says nothing about its speed.
        is_new = published.published_at >= self._started_at
        waited_s = (datetime.now(UTC) - published.published_at).total_seconds()
        rounded = {part: round(value, 3) for part, value in seconds.items()}
        log.info("A version is served.", version=manifest.version, **rounded)
        self._tell(
            WorkerEvent(
                run_id=self._run_id,
                kind="version_served",
                message=f"Version {manifest.version} is loaded and proved.",
                data={
                    "version": manifest.version,
                    "adapter_sha256": manifest.adapter_sha256,
                    "publish_to_served_s": waited_s if is_new else None,
                    "canary_mean_abs_difference": verdict.mean_abs_difference,
                    "canary_separation": verdict.separation,
                    **seconds,
                },
            )
        )

    def _report_refusal(self, manifest: Manifest, error: IntegrityError) -> None:
        log.error("A version was refused.", version=manifest.version, reason=error.detail)
        message = f"Version {manifest.version} is not served: {error.detail}"
        self._tell(
            WorkerEvent(
                run_id=self._run_id,
                kind="canary_failed",
                message=message[:EVENT_CHARS_MAX],
                data={
                    "version": manifest.version,
                    "adapter_sha256": manifest.adapter_sha256,
                },
            )
        )
