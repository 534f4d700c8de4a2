import json
from pathlib import Path

import pytest

from offbeat.errors import InvalidRequestError
from offbeat.plan.architecture import Architecture, architecture_from_config
from offbeat.plan.known_models import KNOWN, architecture_of
from offbeat.plan.parameters import lora_parameters, lora_targets, parameters_of

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "tie_word_embeddings": True,
}


def test_a_config_gives_the_sizes_and_what_it_leaves_out_follows() -> None:
    model = architecture_from_config("tiny", TINY)
    assert (model.hidden, model.num_layers, model.mlp, model.vocabulary) == (32, 2, 64, 258)
    assert (model.head_dim, model.query_width, model.kv_width) == (8, 32, 16)
    assert model.is_tied
    assert architecture_from_config("wide", {**TINY, "head_dim": 16}).query_width == 64
    without_groups = {key: size for key, size in TINY.items() if key != "num_key_value_heads"}
    assert architecture_from_config("old", without_groups).kv_width == 32


def test_a_config_with_experts_gives_the_width_of_one() -> None:
    sparse = {
        **TINY,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    model = architecture_from_config("sparse", sparse)
    assert (model.num_experts, model.experts_per_token, model.mlp) == (8, 2, 16)


def test_a_text_model_inside_another_one_is_found() -> None:
    model = architecture_from_config("vision", {"text_config": TINY, "vision_config": {}})
    assert model.hidden == 32


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, "64", True, 10**9])
def test_a_size_that_is_missing_or_odd_is_named(key: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"has no usable {key}"):
        architecture_from_config("odd", {**TINY, key: value})


def test_more_heads_than_the_hidden_size_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="has no usable head_dim"):
        architecture_from_config("odd", {**TINY, "num_attention_heads": 64})


def test_a_models_parameters_are_counted_by_hand() -> None:
    model = architecture_from_config("tiny", TINY)
    # q 32x32, k and v 32x16, o 32x32; gate, up and down 32x64; two norms of 32.
    block = 1024 + 512 + 512 + 1024 + 3 * 2048 + 64
    counts = parameters_of(model)
    assert counts.block == block == 9280
    assert counts.total == 2 * block + 258 * 32 + 32
    assert counts.active == 2 * (block - 64) + 258 * 32


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("smollm2-135m", 134_515_008),
        ("smollm2-1.7b", 1_711_376_384),
    ],
)
def test_the_known_models_have_their_published_sizes(name: str, total: int) -> None:
    assert parameters_of(KNOWN[name]).total == pytest.approx(total, rel=1e-4)


def test_lora_has_r_times_inputs_and_outputs() -> None:
    model = KNOWN["llama-2-70b"]
    every = lora_targets(model, "all-linear")
    assert lora_parameters(model, 1, every) == 12_943_360
    assert lora_parameters(model, 16, every) == 207_093_760
    some = lora_targets(model, ("q_proj", "model.layers.0.self_attn.v_proj", "lm_head"))
    assert some == {"q_proj", "v_proj"}
    assert lora_parameters(model, 8, some) == 8 * 80 * (8192 + 8192 + 8192 + 1024)


def test_experts_carry_no_lora() -> None:
    assert lora_targets(KNOWN["qwen3-30b-a3b"], "all-linear") == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-Math-1.5B", "qwen2.5-math-1.5b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("smollm2-135m-instruct", "smollm2-135m"),
    ],
)
def test_a_model_is_known_by_its_name(model_id: str, name: str) -> None:
    assert architecture_of(model_id) is KNOWN[name]


@pytest.mark.parametrize("model_id", ["org/llama-2-70", "qwen3", "Qwen/Qwen2.5-VL-7B", "gpt2"])
def test_an_unknown_model_is_refused_with_what_to_do(model_id: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"put its config\.json into a folder") as error:
        architecture_of(model_id)
    assert "llama-2-70b" in error.value.detail


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = architecture_of(str(tmp_path))
    assert isinstance(model, Architecture)
    assert model.name == str(tmp_path)
    assert model.hidden == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "has no config.json that can be read"),
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_folder_without_a_config_is_refused(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequestError, match=complaint):
        architecture_of(str(tmp_path))
