"""A trained model as a folder that `from_pretrained` loads, written to the store by all ranks.

model-00001-of-00005.safetensors, ...     the weights, rounded to the model's type
model.safetensors.index.json              which of these files has which weight
config.json, tokenizer.json, ...          what belongs to them
"""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from offbeat.contracts.weights import VersionFile
from services.trainer.ranks import Ranks

FILE_BYTES = 2 * 2**30
"""Of the weights in one file, unless one of them alone is larger."""


Put = Callable[[str, bytes], VersionFile]
"""Uploads a file of the folder."""


def split_of(weights: Mapping[str, DTensor], dtype: torch.dtype) -> StateDictSplit:
    """Which file has which weights."""
    return split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )


def write_weights(
    put: Put,
    split: StateDictSplit,
    weights: Mapping[str, DTensor],
    dtype: torch.dtype,
    ranks: Ranks,
) -> list[VersionFile]:
    """Gather each weight at the rank that writes its file. Called by all ranks; what they have
    written, at rank 0."""
    own: list[VersionFile] = []
    for number, (name, members) in enumerate(split.filename_to_tensors.items()):
        is_own = number % ranks.size == ranks.rank
        gathered: dict[str, Tensor] = {}
        for member in members:
            whole = weights[member].full_tensor()
            if is_own:
                gathered[member] = whole.to("cpu", dtype).contiguous()
        if is_own:
            own.append(put(name, save(gathered, {"format": "pt"})))
    return list(chain.from_iterable(ranks.gathered(own)))


def write_rest(
    put: Put,
    split: StateDictSplit,
    base: PreTrainedModel,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
) -> list[VersionFile]:
    """Everything but the weights."""
    files: dict[str, bytes] = {}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        files[SAFE_WEIGHTS_INDEX_NAME] = json.dumps(index, indent=2, sort_keys=True).encode()
    with TemporaryDirectory() as temporary:
        config = type(base.config).from_dict(base.config.to_dict())
        config.dtype = dtype
        config.save_pretrained(temporary)
        if base.generation_config is not None:
            base.generation_config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        files |= {path.name: path.read_bytes() for path in sorted(Path(temporary).iterdir())}
    return [put(name, body) for name, body in files.items()]
