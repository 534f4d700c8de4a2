"""The trainer's part of the weight-sync benchmark: one version after the other, without training.

A version is made as a trainer makes it, with the trainer's own code: the same files, state and
moments included, uploaded side by side while the canary is computed, and the manifest last.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from offbeat import keys
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import ADAPTER_FILES, ADAPTER_WEIGHTS, Canary, Manifest
from offbeat.objects import S3ObjectStore
from offbeat.worker_api import WeightProxyClient
from scripts.bench.sync_engine import light_answer
from services.trainer import checkpoint
from services.trainer.canary import first_canary, next_canary
from services.trainer.initial import seeded_adapter
from services.trainer.policy import Policy
from services.trainer.state import TrainerState, starting_state

DRIFT = 1e-4
"""How far a weight moves from one version to the next: AdamW's first step at this rate."""
PROMPT_IDS = tuple(range(1000, 1046))
JOB_ID = "job-bench"


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A version that was published, in Unix time."""

    manifest: Manifest
    began_at: float
    """The first file was encoded."""
    asked_at: float
    """Everything is in the store, and the manifest goes out: the moment of publishing."""
    store_bytes: float
    """What had passed through the store until then."""

    @property
    def adapter_bytes(self) -> int:
        """What generators pull."""
        return sum(self.manifest.file(name).size_bytes for name in ADAPTER_FILES)


class Publisher:
    """A trainer that goes on from its last version."""

    def __init__(
        self,
        *,
        run_id: str,
        spec: RunSpec,
        policy: Policy,
        light: bool,
        store: S3ObjectStore,
        proxy: WeightProxyClient,
        store_bytes: Callable[[], float],
    ) -> None:
        self._run_id = run_id
        self._spec = spec
        self._policy = policy
        self._canary = self._light_canary if light else self._trained_canary
        self._store = store
        self._proxy = proxy
        self._store_bytes = store_bytes
        self._state: TrainerState | None = None
        self._parent: Manifest | None = None

    def publish(self) -> Publication:
        """Make the next version and publish it."""
        version = self._parent.version + 1 if self._parent else 0
        state = self._next_state(version)
        prefix = keys.version_prefix(self._run_id, version, JOB_ID, 1)
        began_at = time.time()
        files = checkpoint.encode(state, self._policy, self._spec)
        with ThreadPoolExecutor(len(files)) as pool:
            uploads = [pool.submit(self._store.put, prefix + name, files[name]) for name in files]
            canary = self._canary(state, files[ADAPTER_WEIGHTS])
            for upload in uploads:
                upload.result()
        manifest = Manifest(
            run_id=self._run_id,
            version=version,
            parent=version - 1 if version else None,
            job_id=JOB_ID,
            attempt=1,
            prefix=prefix,
            files=checkpoint.describe(files),
            base_model=self._spec.model.id,
            base_revision=None,
            rank=self._spec.adapter.rank,
            alpha=self._spec.adapter.alpha,
            target_modules=self._policy.target_modules,
            canary=canary,
        )
        store_bytes, asked_at = self._store_bytes(), time.time()
        self._proxy.publish(manifest)
        self._state, self._parent = state, manifest
        return Publication(
            manifest=manifest, began_at=began_at, asked_at=asked_at, store_bytes=store_bytes
        )

    def _next_state(self, version: int) -> TrainerState:
        if self._state is None:
            return starting_state(seeded_adapter(self._policy.shapes, self._spec.train.seed))
        draw = torch.Generator().manual_seed(version)
        return TrainerState(
            masters={
                name: master + DRIFT * torch.randn(master.shape, generator=draw)
                for name, master in self._state.masters.items()
            },
            exp_avg=self._state.exp_avg,
            exp_avg_sq=self._state.exp_avg_sq,
            num_updates=version,
        )

    def _trained_canary(self, state: TrainerState, _: bytes) -> Canary:
        if self._state is None or self._parent is None:
            return first_canary(self._policy, state.masters, PROMPT_IDS)
        return next_canary(self._policy, state.masters, self._parent.proof, self._state.masters)

    def _light_canary(self, _: TrainerState, weights: bytes) -> Canary:
        ids, logprobs = light_answer(weights)
        return Canary(
            prompt_ids=PROMPT_IDS,
            completion_ids=ids,
            logprobs=logprobs,
            parent_logprobs=self._parent.proof.logprobs if self._parent else (),
        )
