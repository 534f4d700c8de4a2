"""What becomes of a fully trained model: its state in the store, and the folder of its weights."""

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from offbeat.contracts.weights import STATE_INDEX
from offbeat.errors import IntegrityError, OutageError, PermanentJobError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from services.trainer.full_model import FullModel
from services.trainer.ranks import Ranks
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from tests.full_models import DECAY, NORM_MAX, RATE, Plain, saved, spec_of, step, whole, written
from tests.ranks import CPU, group_of_one, memory_of, ragged_examples, running_ranks
from tests.tiny_model import write_tiny_model


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return write_tiny_model(folder, tie_word_embeddings=request.param)


def test_t1_a_state_is_restored_on_another_number_of_ranks(
    model: Path, store: S3ObjectStore, s3_settings: ObjectStoreSettings, tmp_path: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})
    with running_ranks(tmp_path / "two.log", 2, shard_ranks=2, settings=s3_settings) as memory:
        full = memory.full_model(run)
        step(full, run)
        manifest = saved(full, store)
        expected = whole(full, store, tmp_path / "two")
    ranks_that_wrote = {
        file.name[:19] for file in manifest.files if file.name.startswith("trainer_state-")
    }
    assert ranks_that_wrote == {"trainer_state-00000", "trainer_state-00001"}
    with running_ranks(tmp_path / "three.log", 3, shard_ranks=3, settings=s3_settings) as memory:
        full = memory.full_model(run)
        full.restore(manifest, 1)
        for name, weight in whole(full, store, tmp_path / "three").items():
            assert torch.equal(weight, expected[name]), name


@pytest.fixture
def full(model: Path, store: S3ObjectStore) -> Iterator[FullModel]:
    with group_of_one():
        yield memory_of(Ranks(), store=store).full_model(spec_of(model))


def test_a_state_that_is_not_what_its_manifest_says_is_refused(
    full: FullModel, store: S3ObjectStore
) -> None:
    manifest = saved(full, store)
    part = next(file for file in manifest.files if file.name.endswith(".safetensors"))
    body = store.get(manifest.prefix + part.name)
    store.put(manifest.prefix + part.name, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="is not what the manifest of its version says"):
        full.restore(manifest, 0)
    index = json.loads(store.get(manifest.prefix + STATE_INDEX))
    assert index["tensors"]["masters.model.norm.weight"]["chunks"] == [
        {"file": part.name, "offsets": [0], "sizes": [32]}
    ]


def test_a_store_that_is_away_fails_the_save_and_nothing_else(
    full: FullModel, model: Path, s3_settings: ObjectStoreSettings
) -> None:
    away = s3_settings.model_copy(update={"endpoint_url": "http://127.0.0.1:9"})
    full._store = S3ObjectStore.connect(away)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(OutageError):
        full.save("runs/run/versions/000001-job-1/")()
    run = spec_of(model)
    assert step(full, run) == pytest.approx(Plain(model).step(), abs=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(
    full: FullModel, model: Path, store: S3ObjectStore, tmp_path: Path
) -> None:
    before = whole(full, store, tmp_path / "before")
    run = spec_of(model)
    batches = example_batches(ragged_examples(), run.train, CPU)
    sft_gradient(full, batches, run.train, version=1, between=lambda _: None)
    weight = next(iter(full._weights.values()))  # pyright: ignore[reportPrivateUsage]
    assert weight.grad is not None
    weight.grad.fill_(torch.inf)
    assert full.update(RATE, DECAY, NORM_MAX) == float("inf")
    for name, one in whole(full, store, tmp_path / "after").items():
        assert torch.equal(one, before[name]), name
    assert full.num_updates == 0
    assert step(full, run) == pytest.approx(Plain(model).step(), abs=1e-5)


def test_the_folder_has_the_model_its_configuration_and_its_tokenizer(
    full: FullModel, model: Path, store: S3ObjectStore, tmp_path: Path
) -> None:
    loaded = written(full, store, tmp_path / "folder")
    assert loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings == Plain(model).model.config.tie_word_embeddings
    for name, weight in Plain(model).model.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], weight), name
    ours, base = (AutoTokenizer.from_pretrained(one) for one in (tmp_path / "folder", model))
    assert ours("a b c").input_ids == base("a b c").input_ids


def test_a_model_without_a_weight_is_refused(tmp_path: Path, store: S3ObjectStore) -> None:
    broken = write_tiny_model(tmp_path, tie_word_embeddings=True)
    (broken / "model.safetensors").unlink()
    with group_of_one(), pytest.raises(PermanentJobError, match="its files lack"):
        memory_of(Ranks(), store=store).full_model(spec_of(broken))


def live_bytes() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def test_t17_fifty_saves_leave_nothing_behind(full: FullModel) -> None:
    found: list[tuple[int, int]] = []
    for _ in range(2):
        for _ in range(50 if found else 5):
            full.save(f"runs/run-{uuid4().hex}/versions/000001-job-1/")()
        found.append((live_bytes(), threading.active_count()))
    (bytes_before, threads_before), (bytes_after, threads_after) = found
    weights = full._weights.values()  # pyright: ignore[reportPrivateUsage]
    state_bytes = 3 * sum(weight.numel() * weight.element_size() for weight in weights)
    # The last one may still be on its way out; fifty would be ten times as much.
    assert bytes_after <= bytes_before + 5 * state_bytes
    assert threads_after <= threads_before


def test_t4_t20_t24_all_that_is_trained_is_divided_on_the_mesh_of_the_device(
    full: FullModel,
) -> None:
    weights = full._weights  # pyright: ignore[reportPrivateUsage]
    assert {type(weight.data) for weight in weights.values()} == {DTensor}
    assert {weight.device_mesh.device_type for weight in weights.values()} == {"cpu"}
    assert dist.get_backend() == "gloo"
    assert full.device is CPU
