"""A generator that follows a run: a watched engine, a connection that breaks, and one run on a
real weight-proxy."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import ADAPTER_WEIGHTS, Canary
from offbeat.errors import UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.worker_api import WeightProxyClient
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)
from services.generator.weights import RunPolicies
from tests.policies import Reference, upload_policy
from tests.tiny_engine import TinyEngine
from tests.waiting import wait_until

MODEL = ModelSection(id="tiny", dtype="float32")
SPARE_MAX = 1


class WatchedEngine(TinyEngine):
    """Records what is loaded, and can be made to misbehave."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.contents: list[tuple[str, str]] = []
        """Name and sha256 of every load."""
        self.loaded_most = 0
        self.load_failures = 0
        """So many loads fail."""
        self.load_losses = 0
        """So many loads succeed without any effect."""
        self.deaf_to: str | None = None
        """Whatever policy is asked for, this one answers."""
        self.before_canary: Callable[[], object] = never_cancelled

    def load(self, policy: str, folder: Path) -> None:
        digest = hashlib.sha256((folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
        self.contents.append((policy, digest))
        if self.load_failures:
            self.load_failures -= 1
            raise UnavailableError("the engine is out of memory")
        if self.load_losses:
            self.load_losses -= 1
            return
        super().load(policy, folder)
        self.loaded_most = max(self.loaded_most, len(self.loaded()))

    def generate(
        self,
        requests: Sequence[SampleRequest],
        policy: str,
        sampling: Sampling,
        *,
        urgent: bool = False,
        check: Callable[[], None] = never_cancelled,
        on_tokens: Callable[[Sequence[int]], None] = not_heard,
    ) -> list[list[Completion]]:
        if urgent:
            self.before_canary()
        policy = self.deaf_to or policy
        return super().generate(
            requests, policy, sampling, urgent=urgent, check=check, on_tokens=on_tokens
        )


class CutOffClient(WeightProxyClient):
    """A connection that breaks off in the middle of the weights, so many times."""

    cuts = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pulled: list[tuple[int, str]] = []
        """Version and name of every file that was asked for."""

    @contextmanager
    def stream_file(self, run_id: str, version: int, name: str) -> Iterator[Iterator[bytes]]:
        self.pulled.append((version, name))
        with super().stream_file(run_id, version, name) as chunks:
            if self.cuts and name == ADAPTER_WEIGHTS:
                self.cuts -= 1
                yield iter([next(chunks)[:100]])
            else:
                yield chunks


@dataclass(kw_only=True)
class Following:
    """One run and one generator that follows it."""

    run_id: str
    store: S3ObjectStore
    reference: Reference
    client: CutOffClient
    engine: WatchedEngine
    folder: Path
    policies: RunPolicies = field(init=False)
    events: list[WorkerEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policies = self.follow(self.run_id)

    def follow(self, run_id: str) -> RunPolicies:
        return RunPolicies(
            run_id,
            engine=self.engine,
            model=MODEL,
            proxy=self.client,
            tell=self.events.append,
            folder=self.folder,
            spare_max=SPARE_MAX,
        )

    def publish(self, version: int, *, canary: Canary | None = None) -> str:
        """Publish a version, with its own canary unless another is given; its hash."""
        canary = canary or self.reference.canary(version)
        manifest = upload_policy(self.store, self.run_id, version, canary)
        self.client.publish(manifest)
        return manifest.adapter_sha256

    def wait_for(self, version: int) -> None:
        """Until a job could use this version."""
        with self.policies.newest(version, timeout_s=30):
            pass

    def wait_for_event(self, kind: str) -> WorkerEvent:
        """The first event of the kind."""
        wait_until(lambda: any(event.kind == kind for event in self.events))
        return next(event for event in self.events if event.kind == kind)

    @property
    def serving(self) -> list[int]:
        return [served.version for served in self.policies.serving()]

    @property
    def folders(self) -> list[str]:
        return sorted(path.name[:7] for path in self.folder.glob("*/*"))


@contextmanager
def following(
    run_id: str,
    store: S3ObjectStore,
    reference: Reference,
    proxy_url: str,
    model_folder: Path,
    folder: Path,
) -> Iterator[Following]:
    """A run that nobody follows yet, and a generator that would keep its adapters in `folder`."""
    client = CutOffClient(proxy_url)
    setting = Following(
        run_id=run_id,
        store=store,
        reference=reference,
        client=client,
        engine=WatchedEngine(model_folder),
        folder=folder,
    )
    try:
        yield setting
    finally:
        setting.policies.close()
        setting.engine.close()
        client.close()
