"""Weights that are read by rows from the store, as from a folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from offbeat.objects import S3ObjectStore
from services.trainer.weight_files import weights_of_folder, weights_of_store
from tests.tiny_model import upload

INDEX = "model.safetensors.index.json"


@pytest.fixture
def prefix(run_id: str) -> str:
    return f"runs/{run_id}/model/"


def test_rows_of_the_store_are_those_of_the_folder(
    tiny_model: Path, store: S3ObjectStore, prefix: str
) -> None:
    upload(store, tiny_model, prefix)
    stored = weights_of_store(store, prefix)
    with weights_of_folder(tiny_model) as local:
        assert stored.keys() == local.keys()
        for name in local:
            ours, theirs = stored[name].get_slice(name), local[name].get_slice(name)
            assert ours.get_shape() == theirs.get_shape()
            for rows in (slice(None), slice(0, 1), slice(3, 7), slice(5, 10**6)):
                assert torch.equal(ours[rows], theirs[rows]), name


def test_a_model_of_several_files_is_one(store: S3ObjectStore, prefix: str) -> None:
    halves = [{"a": torch.arange(6.0).view(3, 2)}, {"b": torch.ones(4, dtype=torch.bfloat16)}]
    for number, half in enumerate(halves):
        store.put(f"{prefix}model-{number}.safetensors", save(half, {"format": "pt"}))
    store.put(prefix + INDEX, json.dumps({"weight_map": {}}).encode())
    files = weights_of_store(store, prefix)
    assert files["a"].get_slice("a")[1:3].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert files["b"].get_slice("b")[2:].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "its header has 0 bytes"),
        (b"not a safetensors file at all", "its header has"),
        ((10).to_bytes(8, "little") + b"{}", "no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "no safetensors file"),
        ((9).to_bytes(8, "little") + b'{"a": 42}', "no safetensors file"),
    ],
)
def test_what_is_no_such_file_is_refused(
    store: S3ObjectStore, prefix: str, body: bytes, complaint: str
) -> None:
    store.put(f"{prefix}model.safetensors", body)
    with pytest.raises(ValueError, match=complaint):
        weights_of_store(store, prefix)


def test_a_type_that_no_weight_has_is_refused(store: S3ObjectStore, prefix: str) -> None:
    store.put(f"{prefix}model.safetensors", save({"a": torch.ones(2, dtype=torch.int64)}))
    with pytest.raises(ValueError, match="'a' is I64, and not one of F16, BF16, F32, F64"):
        weights_of_store(store, prefix)["a"].get_slice("a")
