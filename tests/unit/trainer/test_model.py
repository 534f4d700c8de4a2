"""Which models the trainer takes, and that it computes what they compute."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from offbeat.algorithms.packing import PackedBatch, Row
from offbeat.contracts.run_spec import LoraSection, ModelSection
from offbeat.devices import device_of
from offbeat.errors import PermanentJobError
from services.trainer.faithful import unscored
from services.trainer.initial import seeded_adapter
from services.trainer.policy import Policy
from tests.tiny_model import write_tiny_model

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def load(
    folder: Path, target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
) -> Policy:
    lora = LoraSection(rank=2, target_modules=target_modules)
    return Policy.load(folder, ModelSection(id="tiny", dtype="float32"), lora, CPU)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def batch(*completions: tuple[int, ...]) -> PackedBatch:
    rows = [Row(prompt_ids=(5, 6), completions=tuple(unscored(ids) for ids in completions))]
    return PackedBatch.of_rows(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_may_be_tied_or_not(tied: bool, tmp_path: Path) -> None:
    """T15: the policy finds the weights that the model scores tokens with."""
    policy = load(write_tiny_model(tmp_path, tie_word_embeddings=tied))
    logprobs_N, entropy_N = policy.logprobs(batch((7, 8), (9,)), 1.0)
    distributions_NV = policy.distributions(batch((7, 8), (9,)))
    assert torch.allclose(logprobs_N, distributions_NV[range(3), [7, 8, 9]], atol=1e-5)
    expected = -(distributions_NV.exp() * distributions_NV).sum(-1)
    assert torch.allclose(entropy_N, expected, atol=1e-5)


def test_the_reference_is_the_base_model(tiny_model: Path) -> None:
    policy = load(tiny_model)
    seeded = seeded_adapter(policy.shapes, 0)
    policy.install(seeded)
    base = policy.distributions(batch((7, 8)))
    policy.install({name: tensor + 0.1 for name, tensor in seeded.items()})
    assert not torch.allclose(policy.distributions(batch((7, 8))), base, atol=0.1)
    with policy.reference():
        assert torch.equal(policy.distributions(batch((7, 8))), base)


def test_the_seeded_adapter_is_within_its_bounds() -> None:
    shapes = {
        "m.lora_A.weight": torch.Size([4, 25]),
        "m.lora_B.weight": torch.Size([9, 4]),
    }
    adapter = seeded_adapter(shapes, 3)
    factor = adapter["m.lora_A.weight"]
    assert 0.15 < factor.abs().max() <= 0.2
    assert factor.std(correction=0) == pytest.approx(0.2 / 3**0.5, rel=0.1)
    assert adapter["m.lora_B.weight"].count_nonzero() == 0


def test_rslora_scales_by_the_root_of_the_rank(tiny_model: Path) -> None:
    """alpha / sqrt(4) of 8 is what plain LoRA makes of an alpha of 16."""
    rank_stabilised, plain = (
        Policy.load(tiny_model, ModelSection(id="tiny", dtype="float32"), lora, CPU)
        for lora in (LoraSection(rank=4, alpha=8, use_rslora=True), LoraSection(rank=4, alpha=16))
    )
    masters = {name: tensor + 0.1 for name, tensor in seeded_adapter(plain.shapes, 0).items()}
    rank_stabilised.install(masters)
    plain.install(masters)
    tried = batch((7, 8))
    assert torch.equal(rank_stabilised.distributions(tried), plain.distributions(tried))


def test_only_the_named_modules_carry_an_adapter(tiny_model: Path) -> None:
    policy = load(tiny_model, ("q_proj",))
    assert policy.target_modules == ("q_proj",)
    assert list(policy.copies) == [
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{factor}.weight"
        for layer in (0, 1)
        for factor in "AB"
    ]


def test_a_module_that_does_not_exist_is_refused(tiny_model: Path) -> None:
    with pytest.raises(PermanentJobError, match="'tiny' cannot be trained: Target modules"):
        load(tiny_model, ("no_such_proj",))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PermanentJobError, match="'tiny' cannot be trained"):
        load(tmp_path)


def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path: Path) -> None:
    """T8, T10: transformers itself would go on with a random one."""
    file = write_tiny_model(tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(PermanentJobError, match=r"lack 'model.layers.1.mlp.up_proj.weight'"):
        load(tmp_path)


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    """A bare head would compute another policy, silently."""
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0)
    with pytest.raises(PermanentJobError, match="Gemma2ForCausalLM transforms its logits"):
        load(saved(Gemma2ForCausalLM(config), tmp_path))


# PEFT announces that its own conversion of Mixtral's experts matches none of the tiny model's.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_an_adapter_on_experts_is_refused(tmp_path: Path) -> None:
    """W11."""
    config = MixtralConfig(**SHAPE, num_local_experts=4)
    folder = saved(MixtralForCausalLM(config), tmp_path)
    with pytest.raises(PermanentJobError, match="is LoRA on an expert"):
        load(folder)


def test_a_sequence_beyond_a_sliding_window_is_refused(tmp_path: Path) -> None:
    config = MistralConfig(**SHAPE, sliding_window=8)
    policy = load(saved(MistralForCausalLM(config), tmp_path))
    policy.check_packing(batch((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5)))
    with pytest.raises(PermanentJobError, match="9 tokens exceeds the model's sliding window of 8"):
        policy.check_packing(batch((1, 2, 3, 4, 5, 6, 7)))


def test_the_device_is_what_the_setting_says() -> None:
    assert device_of("cpu") == CPU
    assert device_of("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
