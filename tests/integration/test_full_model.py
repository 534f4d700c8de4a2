"""All weights of a model, divided among ranks: what a plain training loop makes of one model."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from offbeat.contracts.run_spec import RunSpec
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from services.trainer.full_model import FullModel
from services.trainer.memory import Memory
from services.trainer.ranks import Ranks
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import validation
from tests.full_models import Plain, saved, spec_of, step, whole
from tests.ranks import (
    CPU,
    LAYOUTS,
    MICRO_BATCHES,
    Layout,
    group_of_one,
    memory_of,
    ragged_examples,
    running_ranks,
)
from tests.tiny_model import write_tiny_model

STEPS = 10
ALL_LAYOUTS = {"alone": Layout(size=0, shard_ranks=1, is_tied=False), **LAYOUTS}


@pytest.fixture(scope="module", params=ALL_LAYOUTS.values(), ids=list(ALL_LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def ranked(
    layout: Layout,
    tmp_path_factory: pytest.TempPathFactory,
    s3_settings: ObjectStoreSettings,
    store: S3ObjectStore,
) -> Iterator[Memory]:
    if layout.size == 0:
        with group_of_one():
            yield memory_of(Ranks(), store=store)
        return
    log = tmp_path_factory.mktemp("ranks") / "followers.log"
    with running_ranks(
        log,
        layout.size,
        shard_ranks=layout.shard_ranks,
        offload=layout.offload,
        settings=s3_settings,
    ) as memory:
        yield memory


@pytest.fixture(scope="module")
def model(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, tie_word_embeddings=layout.is_tied)


def anew(memory: Memory, run: RunSpec) -> FullModel:
    """The run's model, which other tests have trained."""
    loaded = memory.full_model(run)
    loaded.begin_anew()
    return loaded


@pytest.mark.parametrize(
    ("budget", "checkpointing"), MICRO_BATCHES.values(), ids=MICRO_BATCHES.keys()
)
def test_t12_t13_t14_t16_a_step_is_that_of_a_plain_loop_whatever_the_ranks_get(
    ranked: Memory, model: Path, budget: int, checkpointing: bool
) -> None:
    run = spec_of(model, train={"token_budget": budget, "gradient_checkpointing": checkpointing})
    plain = Plain(model)
    assert step(anew(ranked, run), run) == pytest.approx(plain.step(), abs=1e-5)


def test_t1_t2_t11_ten_steps_make_the_model_that_a_plain_loop_makes(
    ranked: Memory, model: Path, store: S3ObjectStore, tmp_path: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})
    full, plain = anew(ranked, run), Plain(model)
    for number in range(STEPS):
        assert step(full, run) == pytest.approx(plain.step(), abs=1e-3), number
    ours, expected = whole(full, store, tmp_path / "ours"), dict(plain.model.named_parameters())
    before = dict(Plain(model).model.named_parameters())
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert not torch.equal(ours[name], before[name]), name
        torch.testing.assert_close(ours[name], weight, atol=1e-3, rtol=0)


def test_t3_t5_the_masters_of_a_bfloat16_model_are_float32(ranked: Memory, model: Path) -> None:
    run = spec_of(model, "bfloat16", train={"token_budget": 64})
    full = anew(ranked, run)
    state = full._state()  # pyright: ignore[reportPrivateUsage]
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    expected = Plain(model).step()
    assert step(full, run) == pytest.approx(expected, rel=0.03)


def test_validation_is_that_of_a_plain_loop_and_computes_with_the_newest_weights(
    ranked: Memory, model: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})
    full, plain = anew(ranked, run), Plain(model)
    batches = example_batches(ragged_examples(), run.train, CPU)
    losses = [validation(full, batches, lambda: None)["eval_loss"]]
    step(full, run)
    losses.append(validation(full, batches, lambda: None)["eval_loss"])
    assert losses == pytest.approx([plain.step()[0], plain.step()[0]], abs=1e-4)
    assert losses[1] < losses[0] - 0.05


def test_t1_a_restored_state_goes_on_to_the_bit(
    ranked: Memory, model: Path, store: S3ObjectStore, tmp_path: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})
    full = anew(ranked, run)
    for _ in range(2):
        step(full, run)
    manifest = saved(full, store)
    went_on = [step(full, run) for _ in range(2)]
    expected = whole(full, store, tmp_path / "expected")

    anew(ranked, run)
    full.restore(manifest, 2)
    assert [step(full, run) for _ in range(2)] == went_on
    for name, weight in whole(full, store, tmp_path / "restored").items():
        assert torch.equal(weight, expected[name]), name
    assert full.num_updates == 4


def test_t17_what_is_saved_is_what_was_when_it_was_asked_for(
    ranked: Memory, model: Path, store: S3ObjectStore, tmp_path: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})
    full = anew(ranked, run)
    step(full, run)
    expected = whole(full, store, tmp_path / "expected")
    prefix = f"runs/run-{uuid4().hex}/versions/000001-job-1/"
    wait = full.save(prefix)
    step(full, run)  # beside the upload
    manifest = saved(full, store).model_copy(update={"prefix": prefix, "files": wait()})
    full.restore(manifest, 1)
    for name, weight in whole(full, store, tmp_path / "restored").items():
        assert torch.equal(weight, expected[name]), name
