"""What version 0 may start from."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM

from offbeat import keys
from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS
from offbeat.errors import PermanentJobError
from offbeat.objects import S3ObjectStore
from services.trainer.publish import Trainer
from tests.specs import spec
from tests.trainer import Run, Sample
from tests.weight_proxy import RunningProxy

LINEAR_MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
GROUP = [Sample(ids=(20, 21), reward=1.0), Sample(ids=(30,), reward=0.0)]


@pytest.fixture
def source(run_id: str, store: S3ObjectStore, proxy: RunningProxy, trainer: Trainer) -> Run:
    """A run that has reached version 1."""
    run = Run(run_id=f"{run_id}-source", spec=spec(), store=store, proxy=proxy.client)
    run.train(trainer, 0, run.put_groups(run.init(trainer), [GROUP]))
    return run


def successor(source: Run, init_from: str, **lora: object) -> Run:
    changes = {**lora, "init_from": init_from}
    return Run(
        run_id=f"{source.run_id}-next",
        spec=spec(lora=changes),
        store=source.store,
        proxy=source.proxy,
    )


def test_a_run_starts_from_a_version_of_another(source: Run, trainer: Trainer) -> None:
    published = source.proxy.version(source.run_id, 1)
    assert published is not None
    version_0 = successor(source, f"{source.run_id}@1").init(trainer)
    assert version_0.adapter_sha256 == published.manifest.adapter_sha256
    assert version_0.proof.logprobs == published.manifest.proof.logprobs


def test_t18_a_run_starts_from_a_folder_that_peft_wrote(
    source: Run, trainer: Trainer, tiny_model: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    model.save_pretrained(str(tmp_path))
    for name in ADAPTER_FILES:
        source.store.put(f"{source.run_id}/mine/{name}", (tmp_path / name).read_bytes())
    version_0 = successor(source, f"s3://tests/{source.run_id}/mine").init(trainer)
    published = load(source.store.get(keys.version_file(version_0, ADAPTER_WEIGHTS)))
    written = load((tmp_path / ADAPTER_WEIGHTS).read_bytes())
    assert published.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(published[name], tensor)


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"rank": 4}, r"has r = 2, the spec 4: make them equal"),
        ({"alpha": 8}, r"has lora_alpha = 4, the spec 8: make them equal"),
        (
            {"target_modules": ["q_proj"]},
            r"has base_model.*down_proj.lora_A.weight \[2, 64\], the spec asks for no base_model",
        ),
    ],
)
def test_an_adapter_of_another_form_is_refused(
    lora: dict[str, object], reason: str, source: Run, trainer: Trainer
) -> None:
    with pytest.raises(PermanentJobError, match=reason):
        successor(source, f"{source.run_id}@1", **lora).init(trainer)


@pytest.mark.parametrize(
    ("init_from", "reason"),
    [
        ("nonsense", "write <run>@<version> or s3://bucket/folder"),
        ("run@one", "write <run>@<version> or s3://bucket/folder"),
        ("unknown@3", "run 'unknown' has no version 3"),
        ("s3://tests/nothing-here", "is no PEFT folder: no object under"),
        ("s3://tests", "is no PEFT folder: .* write s3://bucket/key"),
    ],
)
def test_an_adapter_that_is_not_there_is_refused(
    init_from: str, reason: str, source: Run, trainer: Trainer
) -> None:
    with pytest.raises(PermanentJobError, match=reason):
        successor(source, init_from).init(trainer)


def test_an_adapter_that_cannot_be_read_is_refused(source: Run, trainer: Trainer) -> None:
    source.store.put(f"{source.run_id}/broken/{ADAPTER_WEIGHTS}", b"no tensors")
    source.store.put(f"{source.run_id}/broken/{ADAPTER_CONFIG}", b"{}")
    with pytest.raises(PermanentJobError, match="cannot be read"):
        successor(source, f"s3://tests/{source.run_id}/broken").init(trainer)


@pytest.mark.parametrize(
    ("weights", "config", "reason"),
    [
        ({"a": torch.ones(2, 2, dtype=torch.int8)}, b"{}", "a is torch.int8 or has values that"),
        ({"a": torch.full((2, 2), torch.nan)}, b"{}", "has values that are not finite"),
        ({"a": torch.ones(2, 2)}, b"[" * 100_000, "cannot be read: maximum recursion depth"),
        ({"a": torch.ones(2, 2)}, b"7", "cannot be read: 'int' object is not iterable"),
    ],
)
def test_a_hostile_adapter_is_refused(
    weights: dict[str, torch.Tensor], config: bytes, reason: str, source: Run, trainer: Trainer
) -> None:
    folder = f"{source.run_id}/hostile"
    source.store.put(f"{folder}/{ADAPTER_WEIGHTS}", save(weights))
    source.store.put(f"{folder}/{ADAPTER_CONFIG}", config)
    with pytest.raises(PermanentJobError, match=reason):
        successor(source, f"s3://tests/{folder}").init(trainer)


def test_the_adapter_config_is_peft_s_own(source: Run) -> None:
    published = source.proxy.version(source.run_id, 1)
    assert published is not None
    body = source.store.get(keys.version_file(published.manifest, ADAPTER_CONFIG))
    config = json.loads(body)
    assert list(config) == sorted(config)
    expected = {
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": 4,
        "peft_type": "LORA",
        "r": 2,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
    }
    assert {name: config[name] for name in expected} == expected
    targets = tuple(config["target_modules"])
    assert targets == published.manifest.target_modules == tuple(sorted(targets))
    assert {target.rpartition(".")[2] for target in targets} == LINEAR_MODULES
