"""A run of full fine-tuning, job by job: a real store, a real weight-proxy, a tiny real model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.contracts.jobs import ReplayInput, TokenizeOutput
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import STATE_INDEX, STATE_RECORD, Manifest
from offbeat.errors import ObjectNotFoundError, PermanentJobError
from offbeat.objects import S3ObjectStore
from services.trainer.publish import Trainer
from services.trainer.run import replay
from tests.ranks import group_of_one
from tests.sft_run import SftRun
from tests.specs import sft_spec_dict, spec
from tests.tiny_model import write_overflowing_model
from tests.trainer import Run, trainer_on
from tests.weight_proxy import RunningProxy

STEPS = 5


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.fixture
def new_run(proxy: RunningProxy) -> Callable[..., SftRun]:
    def make(**changes: Any) -> SftRun:
        train = {"steps": STEPS, "lr_scheduler": "cosine", **changes.pop("train", {})}
        raw = sft_spec_dict(train=train, **changes)
        del raw["lora"]
        return SftRun(
            run_id=f"run-{uuid4().hex[:10]}",
            spec=RunSpec.model_validate(raw),
            proxy=proxy.client,
        )

    return make


def rows_of(run: SftRun, base_version: int) -> tuple[int, ...]:
    """As the orchestrator names them; the data is not shuffled, and has 8 rows."""
    size = run.spec.sft.batch_size
    return tuple(place % 8 for place in range(base_version * size, (base_version + 1) * size))


ORDERED: dict[str, Any] = {"data": {"shuffle": False}}


def versions_of(
    run: SftRun, trainer_of: Callable[[int], Trainer], data: TokenizeOutput
) -> list[Manifest]:
    """All versions; `trainer_of` gives the trainer of each step."""
    made = [run.init(trainer_of(0), data)]
    for base in range(STEPS):
        made.append(run.train(trainer_of(base), data, base, rows_of(run, base)))
    return made


def names(manifest: Manifest) -> set[str]:
    return {file.name for file in manifest.files}


def loaded(manifest: Manifest, store: S3ObjectStore, folder: Path) -> PreTrainedModel:
    """The model of a last version, as any user of transformers loads it."""
    folder.mkdir()
    for name in names(manifest):
        store.download(manifest.prefix + name, folder / name)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_run_ends_in_a_folder_and_its_versions_are_checkpoints_as_often_as_it_says(
    new_trainer: Callable[[], Trainer],
    new_run: Callable[..., SftRun],
    store: S3ObjectStore,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    trainer, run = new_trainer(), new_run(**ORDERED, train={"checkpoint_every": 2})
    data = run.tokenize(trainer)
    versions = versions_of(run, lambda _: trainer, data)
    state = {STATE_RECORD, STATE_INDEX, "trainer_state-00000-00000.safetensors"}
    assert [names(version) for version in versions[:5]] == [
        {STATE_RECORD},
        {STATE_RECORD},
        state,
        {STATE_RECORD},
        state,
    ]
    assert {"model.safetensors", "config.json", "tokenizer.json"} < names(versions[5])
    assert {version.rank for version in versions} == {None}
    assert not any(version.has_adapter for version in versions)
    losses = [version.metrics["loss"] for version in versions[1:]]
    assert losses[4] < losses[0] - 1.0
    base = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    for name, weight in loaded(versions[5], store, tmp_path / "out").named_parameters():
        assert not torch.equal(weight, base[name]), name


@pytest.mark.parametrize("every", [1, 2, 100])
def test_who_starts_with_nothing_goes_on_to_the_byte(
    new_trainer: Callable[[], Trainer],
    new_run: Callable[..., SftRun],
    every: int,
) -> None:
    """Each step by a trainer that has to restore the last state, and to take again what follows."""
    made: list[list[Manifest]] = []
    for is_interrupted in (False, True):
        trainer, run = new_trainer(), new_run(**ORDERED, train={"checkpoint_every": every})
        data = run.tokenize(trainer)
        versions = versions_of(
            run,
            lambda _, held=trainer, fresh=is_interrupted: new_trainer() if fresh else held,
            data,
        )
        made.append(versions)
    assert [one.sha256 for one in made[0]] == [one.sha256 for one in made[1]]
    for undisturbed, interrupted in zip(*made, strict=True):
        assert set(undisturbed.files) == set(interrupted.files)


def test_two_trainers_of_one_step_agree(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    """The later one adopts what the first has published, and goes on from its own memory."""
    first, second, run = new_trainer(), new_trainer(), new_run(**ORDERED)
    data = run.tokenize(first)
    run.init(first, data)
    rows = rows_of(run, 0)
    version_1 = run.train(first, data, 0, rows)
    assert run.train(second, data, 0, rows) == version_1
    assert second.memory.sealed(run.run_id, 1) is None
    version_2 = run.train(second, data, 1, rows_of(run, 1))
    assert run.train(first, data, 1, rows_of(run, 1)) == version_2
    assert first.memory.holds(version_1)


def test_a_step_replays_to_the_same_record(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    trainer, run = new_trainer(), new_run(**ORDERED, train={"checkpoint_every": 2})
    data = run.tokenize(trainer)
    published = versions_of(run, lambda _: trainer, data)[4]
    job = ReplayInput(base_version=3, examples=run.step(data, 3, rows_of(run, 3)).examples)
    for one in (trainer, new_trainer()):
        replayed = replay(run.context(job, "replay"), one)
        assert replayed.recomputed_sha256 == replayed.published_sha256 == published.sha256
    other = ReplayInput(base_version=3, examples=run.step(data, 3, (0, 1, 2, 3)).examples)
    replayed = replay(run.context(other, "replay"), trainer)
    assert replayed.recomputed_sha256 != replayed.published_sha256


def test_validation_belongs_to_the_step_that_makes_a_version(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun]
) -> None:
    run = new_run(data={"shuffle": False, "eval_size": 2}, eval={"every_steps": 2})
    trainer = new_trainer()
    data = run.tokenize(trainer)
    versions = [run.init(trainer, data)]
    versions += [run.train(trainer, data, base, (0, 1, 2, 3)) for base in range(STEPS)]
    losses = [version.metrics.get("eval_loss") for version in versions]
    assert [loss is not None for loss in losses] == [True, False, True, False, True, True]
    assert losses[0] is not None
    assert losses[5] is not None
    assert losses[5] < losses[0]


def test_a_state_that_retention_has_removed_says_so(
    new_trainer: Callable[[], Trainer], new_run: Callable[..., SftRun], store: S3ObjectStore
) -> None:
    trainer, run = new_trainer(), new_run(**ORDERED)
    data = run.tokenize(trainer)
    run.init(trainer, data)
    version_1 = run.train(trainer, data, 0, rows_of(run, 0))
    store.delete(version_1.prefix + STATE_INDEX)
    with pytest.raises(ObjectNotFoundError, match="no object under"):
        run.train(new_trainer(), data, 1, rows_of(run, 1))


def test_a_step_that_is_not_finite_is_skipped_and_the_third_in_a_row_is_fatal(
    new_run: Callable[..., SftRun], store: S3ObjectStore, proxy: RunningProxy, tmp_path: Path
) -> None:
    folder = write_overflowing_model(tmp_path, "~")
    rows = [{"text": "fine"}, {"text": "a~b"}]
    run = new_run(data={"rows": rows, "shuffle": False}, sft={"batch_size": 2})
    trainer = trainer_on(folder, store, proxy.client)
    data = run.tokenize(trainer)
    run.init(trainer, data)
    first, second = (run.train(trainer, data, base, (0, 1)) for base in range(2))
    assert first.skipped is not None
    assert second.skipped is not None
    assert (first.skipped.in_a_row, second.skipped.in_a_row) == (1, 2)
    assert first.skipped.reason == "the loss of version 1 is nan"
    with pytest.raises(PermanentJobError, match="2 steps before this one were no better: lower"):
        run.train(trainer, data, 2, (1,))
    fresh = trainer_on(folder, store, proxy.client)
    assert run.train(fresh, data, 2, (0,)).skipped is None


def test_a_grpo_run_starts_from_the_model_that_was_trained(
    new_trainer: Callable[[], Trainer],
    new_run: Callable[..., SftRun],
    store: S3ObjectStore,
    proxy: RunningProxy,
    tmp_path: Path,
) -> None:
    trainer, run = new_trainer(), new_run(**ORDERED)
    versions = versions_of(run, lambda _: trainer, run.tokenize(trainer))
    folder = tmp_path / "out"
    trained = loaded(versions[-1], store, folder)
    successor = Run(
        run_id=f"{run.run_id}-grpo",
        spec=spec(model={"id": str(folder)}),
        store=store,
        proxy=proxy.client,
    )
    canary = successor.init(trainer_on(folder, store, proxy.client)).proof
    ids = (*canary.prompt_ids, *canary.completion_ids)
    with torch.no_grad():
        logprobs_TV = trained(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(canary.prompt_ids) - 1
    expected = [logprobs_TV[first + n, one].item() for n, one in enumerate(canary.completion_ids)]
    assert list(canary.logprobs) == pytest.approx(expected, abs=1e-4)
