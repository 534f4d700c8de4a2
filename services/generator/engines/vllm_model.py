"""What an engine must know of a base model whose weights are elsewhere."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offbeat.errors import PermanentJobError
from services.generator.engines.adapter import FACTORS, PEFT_PREFIX


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """The shape of a model; its layers have no memory."""

    layers: Mapping[str, nn.Linear]
    """What an adapter may change; not the experts of a mixture, which vLLM lays out otherwise."""
    eos_ids: frozenset[int]
    """Tokens that end a completion."""

    @classmethod
    def read(cls, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Self:
        """From the configurations in the model's folder."""
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise PermanentJobError(f"the base model cannot be read: {error}") from error
        head = model.get_output_embeddings()
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head and ".experts." not in name
        }
        eos_ids = _ids(config.eos_token_id) | _ids(tokenizer.eos_token_id) | _generation_ids(folder)
        return cls(layers=layers, eos_ids=eos_ids)


def write_blank_adapter(folder: Path, outline: ModelOutline, rank: int) -> None:
    """A PEFT folder that changes nothing: factors of zero on one layer."""
    name, layer = next(iter(outline.layers.items()))
    shapes = ((rank, layer.in_features), (layer.out_features, rank))
    tensors = {
        PEFT_PREFIX + name + factor: torch.zeros(shape)
        for factor, shape in zip(FACTORS, shapes, strict=True)
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": [name],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))


def _generation_ids(folder: Path) -> frozenset[int]:
    try:
        config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return frozenset()
    return _ids(config.eos_token_id)


def _ids(found: object) -> frozenset[int]:
    """One id, several, or none."""
    values = found if isinstance(found, list | tuple) else [found]
    return frozenset(value for value in values if isinstance(value, int))
