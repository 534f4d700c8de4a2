"""The base model with an adapter on it: whole, or a rank's part of it.

A part is made without ever holding the whole: the model is laid out without storage, FSDP2 divides
each block among the ranks, and every rank reads the rows that are its own from the files. The head
stays whole on each rank. It is whole at the peak of every step anyway, when all other activations
are there, so dividing it would save nothing where it counts; and a model whose embedding is its
head keeps them one tensor.

The adapter is not divided either. It is small, all ranks change it alike, and what is published is
complete on whatever number of ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import GENERATION_CONFIG_NAME

from offbeat.contracts.run_spec import LoraSection, ModelSection
from services.trainer.weight_files import OpenWeights, Rows, WeightFiles

if TYPE_CHECKING:
    from services.trainer.nf4 import Nf4


class Quantizer(Protocol):
    """Packs the weight of one layer."""

    @property
    def shape(self) -> list[int]:
        """Of the weight as it is in the files."""
        ...

    def __call__(self, weight: Tensor) -> Tensor:
        """The packed weight."""
        ...


def whole_model(
    folder: Path, model: ModelSection, lora: LoraSection, device: torch.device
) -> PeftModel:
    """Read all of it. Raises OSError or ValueError for files that do not make the model."""
    nf4 = _nf4(model)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, model.dtype),
        attn_implementation=_attention(device),
        quantization_config=nf4.config if nf4 else None,
        # Weights are quantised where they are to stay.
        device_map={"": device} if nf4 else None,
        local_files_only=True,
        output_loading_info=True,
    )
    base, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    if missing := report["missing_keys"]:
        # transformers would go on with random weights in their place.
        raise ValueError(f"its files lack {min(missing)!r}")
    _never_drop(base)
    adapted = _adapted(base, lora)
    if nf4:
        nf4.check_layers(base)
        return adapted
    return cast(PeftModel, adapted.to(device))


def divided_model(
    folder: Path,
    model: ModelSection,
    lora: LoraSection,
    device: torch.device,
    mesh: DeviceMesh,
    open_weights: OpenWeights,
    *,
    offload: bool,
) -> PeftModel:
    """Read this rank's part, and keep it in host memory where it is to be offloaded. Raises as
    `whole_model` does."""
    nf4 = _nf4(model)
    base = laid_out(folder, getattr(torch, model.dtype), device)
    with init_empty_weights(include_buffers=False):
        if nf4:
            nf4.lay_out(base)
        adapted = _adapted(base, lora)
    quantizers = nf4.packed_layers(adapted) if nf4 else {}
    base.tie_weights()  # Each was given a tensor of its own on the way to the meta device.
    _divide(base, mesh, offload=offload)
    with open_weights(folder) as files:
        _read_part(adapted, files, quantizers, device, offload=offload)
    base.tie_weights()
    return adapted


def laid_out(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model without storage for its weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        base = cast(
            PreTrainedModel,
            AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=_attention(device)
            ),
        )
    base.tie_weights()  # Each was given a tensor of its own on the way to the meta device.
    if (folder / GENERATION_CONFIG_NAME).exists():
        base.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _never_drop(base)
    return base


def blocks_of(base: PreTrainedModel) -> list[nn.Module]:
    """What is gathered at once. Raises ValueError for a model that has no blocks."""
    blocks = [block for block in base.modules() if isinstance(block, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError("it has no blocks that could be divided among ranks")
    return list[nn.Module](blocks)


def offload_policy(mesh: DeviceMesh, *, offload: bool) -> OffloadPolicy:
    """Where the parts of weights are while they are not computed with."""
    on_gpu = mesh.device_type != "cpu"
    return CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy()


def rows_of(files: WeightFiles, name: str, shape: list[int]) -> Rows:
    """A weight in the files. Raises ValueError where they lack it, or it has another shape."""
    if name not in files:
        raise ValueError(f"its files lack {name!r}")
    rows = files[name].get_slice(name)
    if rows.get_shape() != shape:
        raise ValueError(f"{name!r} has the shape {rows.get_shape()} in its files")
    return rows


def own_range(weight: DTensor) -> slice:
    """This rank's rows, as `torch.chunk` divides them over the last dimension of the mesh."""
    mesh, num_rows = weight.device_mesh, weight.shape[0]
    shards = mesh.ndim - 1
    each = -(-num_rows // mesh.size(shards))
    start = min(mesh.get_local_rank(shards) * each, num_rows)
    return slice(start, min(start + each, num_rows))


def part_of(weight: DTensor, own: Tensor) -> DTensor:
    """A weight that is divided as this one is, of which this rank has these rows."""
    return DTensor.from_local(
        own,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _nf4(model: ModelSection) -> "Nf4 | None":
    """What brings the model to 4 bits, if it is to have them."""
    if model.quantization == "none":
        return None
    try:
        from services.trainer.nf4 import Nf4
    except ImportError as error:
        raise ValueError(
            'model.quantization = "nf4" needs bitsandbytes on the trainers: '
            "pip install 'offbeat[qlora]'"
        ) from error
    return Nf4(model)


def _attention(device: torch.device) -> str:
    # On CPUs packed attention takes its place, or the plain one where that cannot be.
    return "eager" if device.type == "cpu" else "sdpa"


def _never_drop(base: PreTrainedModel) -> None:
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Engines sample without dropout.


def _adapted(base: PreTrainedModel, lora: LoraSection) -> PeftModel:
    base.requires_grad_(False)
    adapted = get_peft_model(base, _lora_config(lora), autocast_adapter_dtype=False)
    return cast(PeftModel, adapted)


def _lora_config(lora: LoraSection) -> LoraConfig:
    targets, alpha = lora.target_modules, float(lora.alpha)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _divide(base: PreTrainedModel, mesh: DeviceMesh, *, offload: bool) -> None:
    """Block by block; what is outside the blocks is gathered for a forward and freed after it."""
    head = cast(nn.Linear, base.get_output_embeddings()).weight
    whole = {head, *(weight for weight in base.parameters() if weight.requires_grad)}
    for module in (*blocks_of(base), base.base_model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            offload_policy=offload_policy(mesh, offload=offload),
            ignored_params=whole,
        )


def _read_part(
    adapted: PeftModel,
    files: WeightFiles,
    quantizers: Mapping[str, Quantizer],
    device: torch.device,
    *,
    offload: bool,
) -> None:
    """Give every weight its storage: those of the files by rows, those of the adapter as zeros. One
    that is quantised is read whole, and packed."""
    dtype = next(weight.dtype for weight in adapted.parameters() if not weight.requires_grad)
    kept_on = torch.device("cpu") if offload else device
    parts: dict[str, Tensor] = {}
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            parts[name] = torch.zeros(weight.shape, dtype=dtype, device=device)
            continue
        quantizer = quantizers.get(name)
        shape = list(weight.shape) if quantizer is None else quantizer.shape
        rows = rows_of(files, _file_name(name), shape)
        if quantizer is not None:
            rows = quantizer(rows[:].to(device, dtype))
        is_divided = isinstance(weight, DTensor)
        parts[name] = _own_rows(rows, weight, kept_on if is_divided else device)
    adapted.load_state_dict(parts, strict=False, assign=True)


def _own_rows(rows: Rows | Tensor, weight: Tensor, device: torch.device) -> Tensor:
    """This rank's rows; all of a weight that is not divided."""
    if not isinstance(weight, DTensor):
        return rows[:].to(device, weight.dtype)
    own_rows = own_range(weight)
    has_any = own_rows.start < own_rows.stop
    own = rows[own_rows] if has_any else torch.empty(0, *weight.shape[1:])
    return part_of(weight, own.to(device, weight.dtype))


def _file_name(name: str) -> str:
    """A weight's name before PEFT changed it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
