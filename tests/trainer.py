"""A trainer on the tiny model, with a real store and a real weight-proxy, driven job by job."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import torch

from offbeat import keys
from offbeat.contracts.jobs import InitInput, JobInput, ReadyGroup, TrainInput, TrainOutput
from offbeat.contracts.leases import Lease
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Manifest
from offbeat.objects import S3ObjectStore
from offbeat.tables import PromptRow, encode_prompts, encode_rollouts
from offbeat.worker import HandIn, JobContext
from offbeat.worker_api import WeightProxyClient
from services.trainer.memory import Memory
from services.trainer.publish import Trainer
from services.trainer.rollouts import RolloutFetcher
from services.trainer.run import init, train
from services.trainer.sft_batch import example_tables
from services.trainer.versions import Versions
from tests.weight_proxy import RunningProxy

PROMPT_IDS = (5, 6, 7, 8)
GOOD, BAD, WORSE = (20, 21, 22), (30, 31), (40,)
"""Completions."""


def trainer_on(model: Path, store: S3ObjectStore, proxy: WeightProxyClient) -> Trainer:
    """A trainer process that has just started: nothing is in its memory."""
    return Trainer(
        store=store,
        versions=Versions(proxy),
        rollouts=RolloutFetcher(store),
        examples=example_tables(store),
        memory=Memory(lambda _: model, torch.device("cpu"), store=store),
        parent_wait_s=0.0,
    )


def lease_of(
    run_id: str, spec: RunSpec, job: JobInput, job_id: str = "job", attempt: int = 1
) -> Lease:
    """The lease of a job."""
    return Lease(
        job_id=job_id,
        attempt=attempt,
        run_id=run_id,
        run_name="test",
        spec=spec,
        input=job,
        expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        heartbeat_interval_s=5.0,
    )


def finished(result: TrainOutput | HandIn) -> Manifest:
    """The manifest that won, after the hand-in."""
    output = result.finish() if isinstance(result, HandIn) else result
    assert isinstance(output, TrainOutput)
    return output.manifest


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a test says of one sample."""

    ids: tuple[int, ...]
    reward: float | None
    logprobs: tuple[float, ...] | None = None
    """-1 for every token where none are given."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its spec, and where its objects and versions are."""

    run_id: str
    spec: RunSpec
    store: S3ObjectStore
    proxy: WeightProxyClient

    def init(self, trainer: Trainer, job_id: str = "init") -> Manifest:
        """Publish version 0."""
        key = keys.prompts(self.run_id, "prepare", 1, "train")
        row = PromptRow(prompt_id="train-0", prompt="x", prompt_ids=PROMPT_IDS, columns={})
        self.store.put(key, encode_prompts([row]))
        job = InitInput(prompts_key=key)
        return init(JobContext(lease_of(self.run_id, self.spec, job, job_id)), trainer).manifest

    def train(
        self,
        trainer: Trainer,
        base_version: int,
        groups: Sequence[ReadyGroup],
        *,
        job_id: str | None = None,
        attempt: int = 1,
    ) -> Manifest:
        """Publish the next version."""
        return finished(
            train(JobContext(self.train_lease(base_version, groups, job_id, attempt)), trainer)
        )

    def train_lease(
        self,
        base_version: int,
        groups: Sequence[ReadyGroup],
        job_id: str | None = None,
        attempt: int = 1,
    ) -> Lease:
        """The lease of a train job."""
        job = TrainInput(base_version=base_version, groups=tuple(groups))
        return lease_of(self.run_id, self.spec, job, job_id or f"train-{base_version}", attempt)

    def put_groups(
        self,
        manifest: Manifest,
        groups: Sequence[Sequence[Sample]],
        *,
        name: str = "generate",
        adapter_sha256: str | None = None,
        prompt_ids: tuple[int, ...] = PROMPT_IDS,
    ) -> tuple[ReadyGroup, ...]:
        """Store groups as a generator that served the manifest's version would: one object."""
        sha256 = adapter_sha256 or manifest.adapter_sha256
        key = keys.rollouts(self.run_id, name, 1)
        rows = [
            Rollout(
                run_id=self.run_id,
                job_id=name,
                group_id=f"{name}-{index}",
                prompt_id=f"train-{index}",
                sample=place,
                policy_version=manifest.version,
                adapter_sha256=sha256,
                prompt_ids=prompt_ids,
                completion_ids=sample.ids,
                logprobs=sample.logprobs or (-1.0,) * len(sample.ids),
                finish_reason="stop",
                prompt="x",
                completion="y",
                reward=sample.reward,
                rewards={"exact_match": sample.reward},
                generator_id="test",
                engine="test",
                sampled_at=datetime(2026, 1, 1, tzinfo=UTC),
            )
            for index, group in enumerate(groups)
            for place, sample in enumerate(group)
        ]
        self.store.put(key, encode_rollouts(rows, ["exact_match"]))
        return tuple(
            ReadyGroup(
                group_id=f"{name}-{index}",
                rollouts_key=key,
                policy_version=manifest.version,
                adapter_sha256=sha256,
            )
            for index in range(len(groups))
        )


STEP_GROUPS = [
    [Sample(ids=GOOD, reward=1.0), Sample(ids=BAD, reward=0.0)],
    [Sample(ids=BAD, reward=0.0), Sample(ids=WORSE, reward=0.5), Sample(ids=GOOD, reward=1.0)],
]
"""What a step is made of where its numbers do not matter."""


def new_run(store: S3ObjectStore, proxy: RunningProxy, spec: RunSpec) -> Run:
    """A run that nobody has touched."""
    run_id = f"run-{uuid4().hex[:10]}"
    return Run(run_id=run_id, spec=spec, store=store, proxy=proxy.client)


def new_run_like(run: Run) -> Run:
    """Another one of the same spec."""
    return replace(run, run_id=f"run-{uuid4().hex[:10]}")


def hashes(manifest: Manifest) -> dict[str, str]:
    """The content of a version, by file."""
    return {file.name: file.sha256 for file in manifest.files}


def steps(run: Run, trainer: Trainer, first: int, last: int) -> list[Manifest]:
    """Versions first + 1 .. last, each from rollouts of the version before it."""
    made: list[Manifest] = []
    for base_version in range(first, last):
        parent = run.proxy.version(run.run_id, base_version)
        assert parent is not None
        groups = run.put_groups(parent.manifest, STEP_GROUPS, name=f"generate-{base_version}")
        made.append(run.train(trainer, base_version, groups))
    return made
