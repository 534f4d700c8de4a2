"""A simulated trainer: publishes tiny adapters, each upload beside the next step."""

import asyncio
import hashlib
import json
import os
import time
from http import HTTPStatus

from offbeat import keys
from offbeat.contracts.jobs import InitOutput, TrainInput, TrainOutput, WorkerRole
from offbeat.contracts.leases import Lease
from offbeat.contracts.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Canary,
    Manifest,
    PublishedVersion,
    VersionFile,
)
from scripts.bench.scale_calls import NEWER, PUBLISH, VERSION
from scripts.bench.scale_worker import Surroundings, Worker

PARENT_WAIT_S = 5.0
METRICS = 30
"""About as many as a real step reports."""
WIDTH = 64
"""Of the only module that the adapter changes; its factors have rank 1."""
CANARY = Canary(prompt_ids=(1,) * 46, completion_ids=(2,) * 8, logprobs=(-0.5,) * 8)


class Trainer(Worker):
    """See the module."""

    role = WorkerRole.TRAINER

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._sealed: dict[str, int] = {}
        """The newest version of each run that it has computed."""
        self._published: dict[str, int] = {}
        """The newest one of each run that it knows to be there."""
        self._handing_in: asyncio.Task[None] | None = None

    async def work(self, lease: Lease) -> None:
        """Make the version of the job; a step's upload is left to run beside the next job."""
        version = lease.input.base_version + 1 if isinstance(lease.input, TrainInput) else 0
        if not version:
            manifest = await self._publish(lease, version)
            await self.complete(lease, InitOutput(manifest=manifest))
            return
        async with self.beating(lease):
            waited_s = self.lease_took_s + await self._find_parent(lease.run_id, version - 1)
            await asyncio.sleep(self.around.case.train_s)
        self._sealed[lease.run_id] = version
        if self._handing_in is not None:
            await self._handing_in
        began_s = time.monotonic()
        await self.beat(lease, computed=True)
        waited_s += time.monotonic() - began_s
        self.around.ledger.step_waits_s.append(waited_s)
        self._handing_in = self.tasks.create_task(self._hand_in(lease, version))

    async def _find_parent(self, run_id: str, version: int) -> float:
        """How long the service took to say that it is there."""
        wait_s = 0.0
        while True:
            began_s = time.monotonic()
            query = f"?after={version - 1}&wait_s={wait_s:g}"
            answer = await self.caller.call(NEWER, query=query, run=run_id)
            if answer.status == HTTPStatus.OK:
                found = PublishedVersion.model_validate_json(answer.content).manifest
                self._published[run_id] = found.version
            if answer.status == HTTPStatus.OK or self._sealed.get(run_id) == version:
                return time.monotonic() - began_s
            wait_s = PARENT_WAIT_S

    async def _hand_in(self, lease: Lease, version: int) -> None:
        async with self.beating(lease):
            began = time.monotonic()
            manifest = await self._publish(lease, version)
            publish_s = time.monotonic() - began
        await self.complete(lease, TrainOutput(manifest=manifest, publish_s=publish_s))

    async def _publish(self, lease: Lease, version: int) -> Manifest:
        files = version_files()
        manifest = manifest_of(lease, version, files)
        async with asyncio.TaskGroup() as uploads:
            for name, body in files.items():
                uploads.create_task(self.put(manifest.prefix + name, body))
        if version and self._published.get(lease.run_id, -1) < version - 1:
            # It makes sure that the parent is there.
            await self.caller.call(VERSION, run=lease.run_id, version=version - 1)
        while True:
            answer = await self.caller.call(PUBLISH, manifest, run=lease.run_id, version=version)
            if answer.status == HTTPStatus.CONFLICT:
                answer = await self.caller.call(VERSION, run=lease.run_id, version=version)
            if answer.status < HTTPStatus.BAD_REQUEST:
                self._published[lease.run_id] = version
                return PublishedVersion.model_validate_json(answer.content).manifest
            await asyncio.sleep(PARENT_WAIT_S)


def version_files() -> dict[str, bytes]:
    """A whole adapter of its own, and a trainer state."""
    factor_bytes = WIDTH * 4
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = json.dumps(
        {
            name.format(factor): {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [place * factor_bytes, (place + 1) * factor_bytes],
            }
            for place, (factor, shape) in enumerate({"A": [1, WIDTH], "B": [WIDTH, 1]}.items())
        }
    ).encode()
    return {
        ADAPTER_WEIGHTS: len(header).to_bytes(8, "little") + header + os.urandom(2 * factor_bytes),
        ADAPTER_CONFIG: b'{"peft_type": "LORA", "r": 1}',
        "trainer_state.safetensors": os.urandom(6 * factor_bytes),
        "trainer_state.json": b'{"num_updates": 1}',
    }


def manifest_of(lease: Lease, version: int, files: dict[str, bytes]) -> Manifest:
    """What describes them."""
    return Manifest(
        run_id=lease.run_id,
        version=version,
        parent=version - 1 if version else None,
        job_id=lease.job_id,
        attempt=lease.attempt,
        prefix=keys.version_prefix(lease.run_id, version, lease.job_id, lease.attempt),
        files=tuple(
            VersionFile(name=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
            for name, body in files.items()
        ),
        base_model=lease.spec.model.id,
        base_revision=lease.spec.model.revision,
        rank=lease.spec.adapter.rank,
        alpha=lease.spec.adapter.alpha,
        target_modules=("q_proj",),
        canary=CANARY,
        metrics={f"simulated/{number}": 0.5 for number in range(METRICS)},
    )
