"""A simulated generator: it follows runs, pulls every version, and rests where it would sample."""

import asyncio
import hashlib
import os
import time
from http import HTTPStatus

from offbeat import keys
from offbeat.contracts.jobs import GenerateInput, GenerateOutput, PrepareOutput, WorkerRole
from offbeat.contracts.leases import Lease, ServedVersion, WorkerEvent
from offbeat.contracts.rollouts import GroupSummary
from offbeat.contracts.weights import ADAPTER_FILES, Manifest, PublishedVersion
from scripts.bench.scale_calls import FILE, NEWER
from scripts.bench.scale_worker import Surroundings, Worker

RUNS_MAX, RUN_IDLE_S, POLL_WAIT_S = 16, 600.0, 20.0
"""As many runs as a real generator follows, for as long, and as long as it waits for a version."""
PROMPTS = 7473
"""As many as GSM8K has."""
ROLLOUT_BYTES = 2048
"""Of an object with samples; real ones are larger, and no service reads them."""
GROUP_TOKENS = 1000


class FollowedRun:
    """The newest version of a run, pulled as soon as it is published."""

    def __init__(self, run_id: str, generator: "Generator") -> None:
        self.used_at = time.monotonic()
        self.served: ServedVersion | None = None
        self._pulled: set[str] = set()
        """Hashes of the files of the version that it serves."""
        self._run_id = run_id
        self._outbox = generator.outbox
        self._caller = generator.caller
        self._idle_s = RUN_IDLE_S / generator.around.case.pace
        self._changed = asyncio.Condition()
        self.task = generator.tasks.create_task(self._follow())

    async def newest(self, min_version: int) -> ServedVersion:
        """A version that is not older, once it is there."""
        async with self._changed:
            while self.served is None or self.served.version < min_version:
                await self._changed.wait()
            return self.served

    async def _follow(self) -> None:
        # A poll is as long as in the hour, so it is what has to end where a run is idle.
        while (left_s := self.used_at + self._idle_s - time.monotonic()) > 0:
            after = self.served.version if self.served else -1
            query = f"?after={after}&wait_s={min(left_s, POLL_WAIT_S):g}"
            answer = await self._caller.call(NEWER, query=query, run=self._run_id)
            if answer.status == HTTPStatus.OK:
                await self._adopt(PublishedVersion.model_validate_json(answer.content).manifest)

    async def _adopt(self, manifest: Manifest) -> None:
        run_id, version = self._run_id, manifest.version
        for name in ADAPTER_FILES:
            sha256 = manifest.file(name).sha256
            if sha256 in self._pulled:
                continue
            answer = await self._caller.call(FILE, run=run_id, version=version, name=name)
            if answer.status != HTTPStatus.OK:
                return  # given up by retention while it was pulled: there is a newer one
            assert hashlib.sha256(answer.content).hexdigest() == sha256
        self._pulled = {manifest.file(name).sha256 for name in ADAPTER_FILES}
        async with self._changed:
            self.served = ServedVersion(
                run_id=run_id, version=version, adapter_sha256=manifest.adapter_sha256
            )
            self._changed.notify_all()
        served = WorkerEvent(
            run_id=run_id,
            kind="version_served",
            message=f"Version {version} is loaded and proved.",
            data={
                "version": version,
                "adapter_sha256": manifest.adapter_sha256,
                "publish_to_served_s": 0.5,
                "canary_mean_abs_difference": 0.001,
                "canary_separation": 0.1,
                "download_s": 0.1,
                "load_s": 0.1,
                "canary_s": 0.1,
            },
        )
        self._outbox.add(served)


class Generator(Worker):
    """See the module."""

    role = WorkerRole.GENERATOR

    def __init__(self, name: str, around: Surroundings) -> None:
        super().__init__(name, around)
        self._runs: dict[str, FollowedRun] = {}

    def serving(self) -> tuple[ServedVersion, ...]:
        """See `Worker.serving`."""
        return tuple(run.served for run in self._runs.values() if run.served)

    async def work(self, lease: Lease) -> None:
        """Prepare the run's prompts, or sample the groups of the job."""
        if not isinstance(lease.input, GenerateInput):
            await self.complete(lease, await self._prepare(lease))
            return
        async with self.beating(lease):
            output = await self._generate(lease, lease.input)
        await self.complete(lease, output)

    async def _prepare(self, lease: Lease) -> PrepareOutput:
        key = keys.prompts(lease.run_id, lease.job_id, lease.attempt, "train")
        await self.put(key, b"prompts")
        return PrepareOutput(
            prompts_key=key,
            num_prompts=PROMPTS,
            eval_prompts_key=None,
            num_eval_prompts=0,
            stored_bytes=len(b"prompts"),
        )

    async def _generate(self, lease: Lease, job: GenerateInput) -> GenerateOutput:
        run = self._followed(lease.run_id)
        policy = await run.newest(job.min_version)
        generate_s = self.around.case.group_s * len(job.groups)
        await asyncio.sleep(generate_s)
        run.used_at = time.monotonic()
        key = keys.rollouts(lease.run_id, lease.job_id, lease.attempt)
        await self.put(key, os.urandom(ROLLOUT_BYTES))
        return GenerateOutput(
            rollouts_key=key,
            groups=tuple(
                GroupSummary(
                    group_id=group.group_id,
                    policy_version=policy.version,
                    adapter_sha256=policy.adapter_sha256,
                    num_samples=lease.spec.rollout.group_size,
                    num_tokens=GROUP_TOKENS,
                    reward_mean=0.5,
                    reward_std=0.5,
                )
                for group in job.groups
            ),
            generated_tokens=GROUP_TOKENS * len(job.groups),
            generate_s=generate_s,
            stored_bytes=ROLLOUT_BYTES,
        )

    def _followed(self, run_id: str) -> FollowedRun:
        run = self._runs.get(run_id)
        if run is None or run.task.done():
            run = self._runs[run_id] = FollowedRun(run_id, self)
        run.used_at = time.monotonic()
        if len(self._runs) > RUNS_MAX:
            idlest = min(self._runs, key=lambda other: self._runs[other].used_at)
            self._runs.pop(idlest).task.cancel()
        return run
