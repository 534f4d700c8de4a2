"""Jobs of the trainer through its front door: real store, real weight-proxy, a tiny real model."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from safetensors.torch import load

from offbeat import keys
from offbeat.algorithms.packing import PackedBatch, Row
from offbeat.contracts.jobs import ReadyGroup, TrainInput
from offbeat.contracts.leases import Lease
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import ADAPTER_FILES, ADAPTER_WEIGHTS, Manifest
from offbeat.errors import (
    IntegrityError,
    LeaseLostError,
    PermanentJobError,
    UnavailableError,
    WorkerError,
)
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from offbeat.tables import decode_rollouts, encode_rollouts
from offbeat.worker import HandIn, JobContext
from services.trainer.checkpoint import STATE_TENSORS
from services.trainer.faithful import unscored
from services.trainer.publish import Trainer
from services.trainer.run import train
from tests.specs import spec
from tests.trainer import PROMPT_IDS, Run, Sample, finished, trainer_on
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy, running_proxy

GOOD, BAD, WORSE = (20, 21, 22), (30, 31), (40,)
HEADER_BYTES_MAX = 20_000
"""Names and shapes of the tiny adapter's tensors, four times over."""
STEP_GROUPS = [
    [Sample(ids=GOOD, reward=1.0), Sample(ids=BAD, reward=0.0)],
    [Sample(ids=BAD, reward=0.0), Sample(ids=WORSE, reward=0.5), Sample(ids=GOOD, reward=1.0)],
]


@pytest.fixture(scope="module")
def proxy(store: S3ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(store, tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture
def trainer(tiny_model: Path, store: S3ObjectStore, proxy: RunningProxy) -> Trainer:
    return trainer_on(tiny_model, store, proxy.client)


@pytest.fixture
def run(store: S3ObjectStore, proxy: RunningProxy) -> Run:
    return new_run(store, proxy, spec(train={"steps": 4}))


def new_run(store: S3ObjectStore, proxy: RunningProxy, spec: RunSpec) -> Run:
    run_id = f"run-{uuid4().hex[:10]}"
    return Run(run_id=run_id, spec=spec, store=store, proxy=proxy.client)


def new_run_like(run: Run) -> Run:
    return replace(run, run_id=f"run-{uuid4().hex[:10]}")


def hashes(manifest: Manifest) -> dict[str, str]:
    return {file.name: file.sha256 for file in manifest.files}


def tensors(run: Run, manifest: Manifest, name: str = ADAPTER_WEIGHTS) -> dict[str, torch.Tensor]:
    return load(run.store.get(keys.version_file(manifest, name)))


def steps(run: Run, trainer: Trainer, first: int, last: int) -> list[Manifest]:
    """Versions first + 1 .. last, each from rollouts of the version before it."""
    made: list[Manifest] = []
    for base_version in range(first, last):
        parent = run.proxy.version(run.run_id, base_version)
        assert parent is not None
        groups = run.put_groups(parent.manifest, STEP_GROUPS, name=f"generate-{base_version}")
        made.append(run.train(trainer, base_version, groups))
    return made


def test_the_same_state_and_rollouts_give_the_same_bytes(
    tiny_model: Path, store: S3ObjectStore, proxy: RunningProxy
) -> None:
    """Also the same seed gives the same version 0 (W15)."""
    made: list[list[Manifest]] = []
    for _ in range(2):
        run = new_run(store, proxy, spec())
        trainer = trainer_on(tiny_model, store, proxy.client)
        made.append([run.init(trainer), *steps(run, trainer, 0, 1)])
    for first, second in zip(*made, strict=True):
        assert hashes(first) == hashes(second)
        assert first.canary == second.canary
    assert hashes(made[0][0]) != hashes(made[0][1])


def test_another_seed_gives_another_adapter(
    store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer
) -> None:
    digests = {
        new_run(store, proxy, spec(train={"seed": seed})).init(trainer).adapter_sha256
        for seed in (0, 1)
    }
    assert len(digests) == 2


def test_a_resumed_run_equals_an_uninterrupted_one_byte_for_byte(
    tiny_model: Path, store: S3ObjectStore, proxy: RunningProxy
) -> None:
    """P13: a trainer that starts with nothing but the store goes on where the first one died."""
    changes = {"steps": 4, "lr_scheduler": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    plans = {"uninterrupted": [(0, 4)], "resumed": [(0, 2), (2, 4)]}
    made: dict[str, list[dict[str, str]]] = {}
    for name, parts in plans.items():
        run = new_run(store, proxy, spec(train=changes, lora={"dropout": 0.1}))
        run.init(trainer_on(tiny_model, store, proxy.client))
        versions = [
            manifest
            for first, last in parts
            for manifest in steps(run, trainer_on(tiny_model, store, proxy.client), first, last)
        ]
        made[name] = [hashes(version) for version in versions]
    assert made["resumed"] == made["uninterrupted"]


def test_every_factor_moves_and_the_base_does_not(run: Run, trainer: Trainer) -> None:
    """W14, T19: after one step every B is non-zero; the base computes what it did, bit for bit."""
    version_0 = tensors(run, run.init(trainer))
    before = base_logprobs(run, trainer)
    (manifest,) = steps(run, trainer, 0, 1)
    version_1 = tensors(run, manifest)
    factors = [name for name in version_1 if name.endswith("lora_B.weight")]
    assert len(factors) == 2 * 7
    for name in factors:
        assert version_0[name].count_nonzero() == 0
        assert version_1[name].count_nonzero() == version_1[name].numel()
    assert torch.equal(base_logprobs(run, trainer), before)


def base_logprobs(run: Run, trainer: Trainer) -> torch.Tensor:
    policy = trainer.memory.policy(run.spec)
    row = Row(prompt_ids=PROMPT_IDS, completions=(unscored(GOOD), unscored(BAD)))
    with policy.reference():
        return policy.logprobs(PackedBatch.of_rows([row]), 1.0)[0]


def test_p5_a_version_is_small(run: Run, trainer: Trainer) -> None:
    """W16, P5: generators pull the adapter's parameters and little else."""
    run.init(trainer)
    (manifest,) = steps(run, trainer, 0, 1)
    parameter_bytes = sum(4 * tensor.numel() for tensor in tensors(run, manifest).values())
    pulled = sum(manifest.file(name).size_bytes for name in ADAPTER_FILES)
    assert parameter_bytes < pulled <= 2 * parameter_bytes
    whole = sum(file.size_bytes for file in manifest.files)
    assert whole <= 4 * parameter_bytes + HEADER_BYTES_MAX


def test_a_published_version_is_adopted_without_work(run: Run, trainer: Trainer) -> None:
    """An attempt died between its publish and its report: the next one only reports."""
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    first = run.train(trainer, 0, groups)
    run.store.put(groups[0].rollouts_key, b"would fail to decode")
    assert run.train(trainer, 0, groups, attempt=2) == first
    assert run.init(trainer, job_id="init-again") == version_0


class Interrupted(JobContext):
    """Does something in the middle of the job: at the first check between units of work."""

    def __init__(self, lease: Lease, interruption: Callable[[], object]) -> None:
        super().__init__(lease)
        self.interruption: Callable[[], object] | None = interruption

    def check(self) -> None:
        if self.interruption is not None:
            interruption, self.interruption = self.interruption, None
            interruption()
        super().check()


def test_a_state_that_is_still_in_memory_is_not_fetched(run: Run, trainer: Trainer) -> None:
    """The next job of the run finds base model, masters and moments where it left them."""
    version_0 = run.init(trainer)
    run.store.put(keys.version_file(version_0, STATE_TENSORS), b"would be refused")
    assert run.train(trainer, 0, run.put_groups(version_0, STEP_GROUPS)).version == 1


def test_a_trainer_that_comes_second_goes_on_from_the_winner(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """The late one drops its own state: its next step equals the winner's next step."""
    other = trainer_on(tiny_model, run.store, run.proxy)
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    late_groups = run.put_groups(run.init(trainer), [STEP_GROUPS[0]], name="late")
    won: list[Manifest] = []
    context = Interrupted(
        run.train_lease(0, late_groups, "late"),
        lambda: won.append(run.train(other, 0, groups, job_id="winner")),
    )
    assert finished(train(context, trainer)) == won[0]
    assert won[0].job_id == "winner"
    next_groups = run.put_groups(won[0], STEP_GROUPS, name="generate-1")
    after = run.train(trainer, 1, next_groups)
    twin = new_run_like(run)
    twin.init(other)
    steps(twin, other, 0, 1)
    assert hashes(after) == hashes(steps(twin, other, 1, 2)[0])


def test_a_job_that_was_taken_away_publishes_nothing_and_the_next_attempt_is_undisturbed(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    context = JobContext(run.train_lease(0, groups))
    context.revoke()
    with pytest.raises(LeaseLostError):
        train(context, trainer)
    assert run.proxy.version(run.run_id, 1) is None
    assert_same_step(run, trainer, groups, tiny_model)


def test_the_next_step_starts_while_its_parent_is_handed_in(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """The versions are those of a trainer that publishes each step before the next."""
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    late_groups = run.put_groups(version_0, STEP_GROUPS, name="late")
    first = train(JobContext(run.train_lease(0, groups)), trainer)
    second = train(JobContext(run.train_lease(1, late_groups)), trainer)
    assert run.proxy.version(run.run_id, 1) is None
    overlapped = [finished(first), finished(second)]
    twin, other = new_run_like(run), trainer_on(tiny_model, run.store, run.proxy)
    version_0 = twin.init(other)
    plain = [twin.train(other, 0, twin.put_groups(version_0, STEP_GROUPS))]
    plain += [twin.train(other, 1, twin.put_groups(version_0, STEP_GROUPS, name="late"))]
    assert [hashes(manifest) for manifest in overlapped] == [hashes(one) for one in plain]


def test_x5_a_step_whose_parent_was_never_published_is_not_published(
    run: Run, trainer: Trainer
) -> None:
    version_0 = run.init(trainer)
    lost = train(JobContext(run.train_lease(0, run.put_groups(version_0, STEP_GROUPS))), trainer)
    assert isinstance(lost, HandIn)
    orphan = train(
        JobContext(run.train_lease(1, run.put_groups(version_0, STEP_GROUPS, name="late"))), trainer
    )
    with pytest.raises(WorkerError, match="was not published: the step is taken again"):
        finished(orphan)
    assert run.proxy.version(run.run_id, 2) is None


def test_a_step_whose_parent_lost_to_another_version_is_not_published(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    others = run.put_groups(version_0, [STEP_GROUPS[0]], name="others")
    loser = train(JobContext(run.train_lease(0, others, "loser")), trainer)
    orphan = train(JobContext(run.train_lease(1, groups)), trainer)
    winner = run.train(trainer_on(tiny_model, run.store, run.proxy), 0, groups, job_id="winner")
    assert finished(loser) == winner
    with pytest.raises(WorkerError, match="was not published"):
        finished(orphan)


def test_rollouts_that_wait_for_the_next_step_are_fetched_beside_this_one(
    run: Run, tiny_model: Path, s3_settings: ObjectStoreSettings
) -> None:
    store = CountingStore.connect(s3_settings)
    assert isinstance(store, CountingStore)
    trainer = trainer_on(tiny_model, store, run.proxy)
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    waiting = run.put_groups(version_0, STEP_GROUPS, name="late")
    key = waiting[0].rollouts_key
    context = JobContext(run.train_lease(0, groups))
    context.waiting_rollouts = (key,)
    finished(train(context, trainer))
    wait_until(lambda: store.reads[key] == 1)
    run.train(trainer, 1, waiting)
    assert store.reads[key] == 1


class CountingStore(S3ObjectStore):
    """A store that counts how often each object is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reads: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.reads[key] += 1
        return super().get(key)


class FailingStore(S3ObjectStore):
    """A store that stops taking objects at some moment."""

    is_down = False

    def put(self, key: str, body: bytes) -> None:
        if self.is_down:
            raise UnavailableError("the store is down")
        super().put(key, body)


def test_a_step_whose_upload_failed_can_be_repeated(
    run: Run, tiny_model: Path, s3_settings: ObjectStoreSettings
) -> None:
    """The optimizer had moved, but nobody may ever see it: memory still holds the parent."""
    store = FailingStore.connect(s3_settings)
    assert isinstance(store, FailingStore)
    trainer = trainer_on(tiny_model, store, run.proxy)
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    store.is_down = True
    with pytest.raises(UnavailableError, match="the store is down"):
        run.train(trainer, 0, groups)
    store.is_down = False
    assert_same_step(run, trainer, groups, tiny_model)


def assert_same_step(
    run: Run, trainer: Trainer, groups: Sequence[ReadyGroup], tiny_model: Path
) -> None:
    """The next attempt makes what a trainer without a history makes of a twin run."""
    made = run.train(trainer, 0, groups, attempt=2)
    twin = new_run_like(run)
    fresh = trainer_on(tiny_model, run.store, run.proxy)
    twin.init(fresh)
    assert hashes(made) == hashes(steps(twin, fresh, 0, 1)[0])


def test_groups_of_an_unknown_policy_are_refused_and_named(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """Invariant 2: the step equals the one over the other groups alone."""
    version_0 = run.init(trainer)
    known = run.put_groups(version_0, STEP_GROUPS)
    forged = run.put_groups(version_0, STEP_GROUPS, name="forged", adapter_sha256="0" * 64)
    manifest = run.train(trainer, 0, [forged[0], *known, forged[1]])
    assert manifest.dropped_group_ids == ("forged-0", "forged-1")
    twin = new_run_like(run)
    twin.init(trainer)
    assert hashes(manifest) == hashes(steps(twin, trainer, 0, 1)[0])


def test_groups_that_are_too_old_are_refused_unless_the_run_keeps_them(
    store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer
) -> None:
    """S1: staleness counts from the version that is trained, so time in storage counts too."""
    for policy, dropped in (("drop", ("old-0", "old-1")), ("keep", ())):
        run = new_run(store, proxy, spec(staleness={"max_versions": 1, "policy": policy}))
        old = run.put_groups(run.init(trainer), STEP_GROUPS, name="old")
        versions = steps(run, trainer, 0, 2)
        assert run.train(trainer, 2, old).dropped_group_ids == dropped
        assert len(versions) == 2


def test_a_step_without_a_signal_makes_a_version_that_changes_nothing(
    run: Run, trainer: Trainer
) -> None:
    version_0 = run.init(trainer)
    silent: list[list[Sample]] = [
        [Sample(ids=GOOD, reward=1.0), Sample(ids=BAD, reward=1.0)],
        [Sample(ids=GOOD, reward=None)],
    ]
    manifest = run.train(trainer, 0, run.put_groups(version_0, silent))
    assert manifest.version == 1
    assert hashes(manifest) == hashes(version_0)
    assert manifest.canary.logprobs == manifest.canary.parent_logprobs == version_0.canary.logprobs
    expected = {
        "batch/rows_per_step": 0,
        "batch/forwarded_tokens_per_step": 0,
        "frac_reward_zero_std": 1.0,
        "grad_norm": 0.0,
        "loss": 0.0,
        "learning_rate": 0.01,
        "reward": 1.0,
        "completions/mean_length": 8 / 3,
    }
    assert expected.items() <= manifest.metrics.items()
    assert "ratio" not in manifest.metrics


def test_a_step_of_which_every_group_was_refused_still_ends(run: Run, trainer: Trainer) -> None:
    version_0 = run.init(trainer)
    forged = run.put_groups(version_0, STEP_GROUPS, adapter_sha256="0" * 64)
    manifest = run.train(trainer, 0, forged)
    assert manifest.dropped_group_ids == ("generate-0", "generate-1")
    assert hashes(manifest) == hashes(version_0)


def test_a_step_that_is_not_finite_is_skipped_and_the_third_in_a_row_is_fatal(
    store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer
) -> None:
    """W13. Without a correction a ratio of e^1000 meets a negative advantage."""
    run = new_run(store, proxy, spec(train={"correction": "none"}))
    version_0 = run.init(trainer)
    impossible = Sample(ids=BAD, reward=0.0, logprobs=(-1000.0, -1.0))
    groups = run.put_groups(version_0, [[Sample(ids=GOOD, reward=1.0), impossible]])
    first = run.train(trainer, 0, groups)
    second = run.train(trainer, 1, groups)
    assert hashes(first) == hashes(second) == hashes(version_0)
    assert first.skipped is not None
    assert second.skipped is not None
    assert (first.skipped.in_a_row, second.skipped.in_a_row) == (1, 2)
    assert first.skipped.reason == "the loss of version 1 is inf"
    aside = TrainInput.model_validate_json(store.get(first.skipped.batch_key))
    assert aside == TrainInput(base_version=0, groups=tuple(groups))
    with pytest.raises(PermanentJobError, match=r"2 steps before this one were no better: lower"):
        run.train(trainer, 2, groups)
    assert run.proxy.version(run.run_id, 3) is None


def test_a_good_step_ends_a_row_of_skipped_ones(
    store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer
) -> None:
    run = new_run(store, proxy, spec(train={"correction": "none"}))
    version_0 = run.init(trainer)
    impossible = Sample(ids=BAD, reward=0.0, logprobs=(-1000.0, -1.0))
    bad = [[Sample(ids=GOOD, reward=1.0), impossible]]
    run.train(trainer, 0, run.put_groups(version_0, bad))
    good = run.put_groups(version_0, STEP_GROUPS, name="good")
    assert run.train(trainer, 1, good).skipped is None
    third = run.train(trainer, 2, run.put_groups(version_0, bad))
    assert third.skipped is not None
    assert third.skipped.in_a_row == 1


def test_a_state_that_is_not_what_its_manifest_says_is_refused(
    run: Run, trainer: Trainer, tiny_model: Path
) -> None:
    """P12: the hash is checked after the download, whatever the store says."""
    version_0 = run.init(trainer)
    groups = run.put_groups(version_0, STEP_GROUPS)
    run.store.put(keys.version_file(version_0, STATE_TENSORS), b"cut off")
    with pytest.raises(IntegrityError, match="is not what the manifest of its version says"):
        run.train(trainer_on(tiny_model, run.store, run.proxy), 0, groups)


def test_a_step_from_a_version_that_is_not_there_fails(run: Run, trainer: Trainer) -> None:
    groups = run.put_groups(run.init(trainer), STEP_GROUPS)
    with pytest.raises(WorkerError, match=r"version 4 .* is not published"):
        run.train(trainer, 4, groups)


def test_a_group_that_its_object_does_not_hold_fails(run: Run, trainer: Trainer) -> None:
    (group, _) = run.put_groups(run.init(trainer), STEP_GROUPS)
    missing = group.model_copy(update={"group_id": "other"})
    with pytest.raises(IntegrityError, match="has no group 'other'"):
        run.train(trainer, 0, [group, missing])


def test_a_group_of_two_prompts_fails(run: Run, trainer: Trainer) -> None:
    """A row has one prompt, so the second would be trained after a text it never followed."""
    (group, _) = run.put_groups(run.init(trainer), STEP_GROUPS)
    samples = decode_rollouts(run.store.get(group.rollouts_key))
    mixed = [samples[0].model_copy(update={"prompt_ids": (9,)}), *samples[1:]]
    run.store.put(group.rollouts_key, encode_rollouts(mixed, ["exact_match"]))
    with pytest.raises(IntegrityError, match="the samples of group 'generate-0' differ"):
        run.train(trainer, 0, [group])
