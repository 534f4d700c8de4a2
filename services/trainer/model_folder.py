"""A trained model as a folder that `from_pretrained` loads, written to the store by all ranks.

model-00001-of-00005.safetensors, ...     the weights, rounded to the model's type
model.safetensors.index.json              which of these files has which weight
config.json, tokenizer.json, ...          what belongs to them
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import VersionFile
from offbeat.models import load_tokenizer
from offbeat.objects import ObjectStore
from services.trainer.ranks import Ranks

FILE_BYTES = 2 * 2**30
"""Of the weights in one file, unless one of them alone is larger."""


def write_weights(
    store: ObjectStore,
    prefix: str,
    weights: Mapping[str, DTensor],
    dtype: torch.dtype,
    ranks: Ranks,
) -> list[VersionFile]:
    """Gather each weight at the rank that writes its file. Called by all ranks; what they have
    written, at rank 0."""
    own: list[VersionFile] = []
    split = _split(weights, dtype)
    for number, (name, members) in enumerate(split.filename_to_tensors.items()):
        is_own = number % ranks.size == ranks.rank
        gathered: dict[str, Tensor] = {}
        for member in members:
            whole = weights[member].full_tensor()
            if is_own:
                gathered[member] = whole.to("cpu", dtype).contiguous()
        if is_own:
            own.append(_put(store, prefix, name, save(gathered, {"format": "pt"})))
    return list(chain.from_iterable(ranks.gathered(own)))


def write_rest(
    store: ObjectStore,
    prefix: str,
    weights: Mapping[str, DTensor],
    dtype: torch.dtype,
    base: PreTrainedModel,
    folder: Path,
    model: ModelSection,
) -> list[VersionFile]:
    """Everything but the weights; the tokenizer is that of the base model's folder."""
    split = _split(weights, dtype)
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
        load_tokenizer(folder, model.chat_template).save_pretrained(temporary)
        files |= {path.name: path.read_bytes() for path in sorted(Path(temporary).iterdir())}
    return [_put(store, prefix, name, body) for name, body in files.items()]


def _split(weights: Mapping[str, DTensor], dtype: torch.dtype) -> StateDictSplit:
    return split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.numel() * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )


def _put(store: ObjectStore, prefix: str, name: str, body: bytes) -> VersionFile:
    store.put(prefix + name, body)
    return VersionFile(name=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
