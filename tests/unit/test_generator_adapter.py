"""Reading PEFT folders: what is not whole, finite, plain LoRA of this model never gets in."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save
from torch import nn
from transformers import AutoModelForCausalLM

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offbeat.errors import IntegrityError
from services.generator.engines.adapter import read_adapter
from tests.policies import peft_files, policy_tensors, write_policy

LAYERS = {
    f"model.layers.{layer}.self_attn.{name}": nn.Linear(32, rows, bias=False)
    for layer in range(2)
    for name, rows in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))
}
A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

Tensors = dict[str, np.ndarray]


def test_a_folder_of_offbeat_is_read(tmp_path: Path) -> None:
    tensors = policy_tensors(1)
    adapter = read_adapter(write_policy(tmp_path / "v1", tensors), LAYERS)
    assert adapter.scaling == 2.0
    assert len(adapter.factors) == 4
    a_RI, b_OR = adapter.factors["model.layers.0.self_attn.q_proj"]
    assert np.array_equal(a_RI.numpy(), tensors[A_NAME])
    assert np.array_equal(b_OR.numpy(), tensors[B_NAME])


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 1.5), (True, 3.0)])
def test_a_folder_that_peft_wrote_is_read(
    use_rslora: bool, scaling: float, tiny_model: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        use_rslora=use_rslora,
    )
    get_peft_model(base, config).save_pretrained(str(tmp_path))
    layers = {
        name: module
        for name, module in AutoModelForCausalLM.from_pretrained(tiny_model).named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    adapter = read_adapter(tmp_path, layers)
    assert adapter.scaling == scaling
    assert adapter.factors.keys() == layers.keys()


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _with(name: str, value: np.ndarray) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(_without(B_NAME), "they differ in .*q_proj.lora_B", id="a missing factor"),
        pytest.param(
            _with("base_model.model.lm_head.lora_A.weight", np.zeros((2, 32), "f4")),
            "they differ in base_model.model.lm_head",
            id="the head",
        ),
        pytest.param(
            _with(A_NAME, np.full((2, 32), np.nan, "f4")), "lora_A.weight has values", id="nan"
        ),
        pytest.param(
            _with(B_NAME, np.full((32, 2), np.inf, "f4")), "lora_B.weight has values", id="inf"
        ),
        pytest.param(_with(B_NAME, np.zeros((16, 2), "f4")), "was a shard saved", id="a shard"),
        pytest.param(_with(A_NAME, np.zeros((3, 32), "f4")), "needs factors", id="another rank"),
    ],
)
def test_tensors_that_are_no_adapter_of_this_model_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], reason: str
) -> None:
    """W10, W13, P4."""
    folder = write_policy(tmp_path / "v1", change(policy_tensors(1)))
    with pytest.raises(IntegrityError, match=reason):
        read_adapter(folder, LAYERS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"bias": "all"}, "bias all"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"r": "many"}, "no PEFT configuration"),
        ({"target_modules": ["q_proj"]}, "they differ in"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "they differ in"),
        ({"target_modules": ["gate_proj"]}, "they differ in"),
    ],
)
def test_configurations_that_mean_something_else_are_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    folder = write_policy(tmp_path / "v1", policy_tensors(1))
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(IntegrityError, match=reason):
        read_adapter(folder, LAYERS)


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_a_cut_file_is_refused(tmp_path: Path, kept: float) -> None:
    """P6."""
    folder = write_policy(tmp_path / "v1", policy_tensors(1))
    body = peft_files(policy_tensors(1))[ADAPTER_WEIGHTS]
    (folder / ADAPTER_WEIGHTS).write_bytes(body[: int(len(body) * kept)])
    with pytest.raises(IntegrityError, match="cannot be read"):
        read_adapter(folder, LAYERS)


@pytest.mark.parametrize(
    "config",
    [
        b"[" * 100_000,
        b'{"r": 0, "lora_alpha": 1, "target_modules": []}',
        b'{"r": 1e400, "lora_alpha": 1, "target_modules": []}',
        b'{"r": 1, "lora_alpha": 1, "target_modules": 7}',
        b"[]",
        b"\xff",
    ],
)
def test_a_hostile_configuration_is_refused(tmp_path: Path, config: bytes) -> None:
    folder = write_policy(tmp_path / "v1", policy_tensors(1))
    (folder / ADAPTER_CONFIG).write_bytes(config)
    with pytest.raises(IntegrityError, match=r"adapter_config.json is no PEFT configuration"):
        read_adapter(folder, LAYERS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath(ADAPTER_WEIGHTS).write_bytes(save(policy_tensors(1)))
    with pytest.raises(IntegrityError, match="no PEFT configuration"):
        read_adapter(tmp_path, LAYERS)
