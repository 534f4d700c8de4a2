"""Jobs of the trainer through its front door: real store, real weight-proxy, a tiny real model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from offbeat import keys
from offbeat.algorithms.packing import PackedBatch, Row
from offbeat.contracts.jobs import TrainInput
from offbeat.contracts.weights import ADAPTER_FILES, ADAPTER_WEIGHTS, Manifest
from offbeat.errors import IntegrityError, PermanentJobError, WorkerError
from offbeat.objects import S3ObjectStore
from offbeat.tables import decode_rollouts, encode_rollouts
from services.trainer.checkpoint import STATE_TENSORS
from services.trainer.faithful import unscored
from services.trainer.publish import Trainer
from tests.specs import spec
from tests.trainer import (
    BAD,
    GOOD,
    PROMPT_IDS,
    STEP_GROUPS,
    Run,
    Sample,
    hashes,
    new_run,
    new_run_like,
    steps,
    trainer_on,
)
from tests.weight_proxy import RunningProxy

HEADER_BYTES_MAX = 20_000
"""Names and shapes of the tiny adapter's tensors, four times over."""


def tensors(run: Run, manifest: Manifest, name: str = ADAPTER_WEIGHTS) -> dict[str, torch.Tensor]:
    return load(run.store.get(keys.version_file(manifest, name)))


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
        assert first.proof == second.proof
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


def test_groups_of_an_unknown_policy_are_refused_and_named(run: Run, trainer: Trainer) -> None:
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
    assert manifest.proof.logprobs == manifest.proof.parent_logprobs == version_0.proof.logprobs
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
