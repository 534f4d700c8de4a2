"""QLoRA: the linear layers of the base model in 4 bits (NF4), by bitsandbytes.

Dettmers et al., "QLoRA", arXiv 2305.14314. Blocks of 64 weights share a constant, and each weight
is a place in a table of 16 numbers; the constants are quantised once more. What is packed is kept
as if it were numbers of the model's own type: FSDP2 divides and gathers floats alone, and would
otherwise cast the bytes. The constants are no parameters, and every rank has all of them.

The adapter, its gradient and what is published are those of any other run. A generator may serve
the base model as it is; its canary tells how far that is from this one.
"""

from dataclasses import dataclass

import torch
from bitsandbytes.functional import quantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from offbeat.contracts.run_spec import ModelSection

BITS = 4
BLOCK = 64
"""Weights with a constant of their own; the library's default."""


@dataclass(frozen=True)
class LayerQuantizer:
    """See `base_model.Quantizer`."""

    layer: Linear4bit

    @property
    def shape(self) -> list[int]:
        """See `base_model.Quantizer`."""
        return [self.layer.out_features, self.layer.in_features]

    def __call__(self, weight: Tensor) -> Tensor:
        """The packed weight, (rows, 1); its constants are the layer's from now on."""
        packed, constants = quantize_4bit(
            weight,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=self.layer.quant_storage,
        )
        self.layer.quant_state = constants  # pyright: ignore[reportAttributeAccessIssue]
        return packed


class Nf4:
    """How one model is brought to 4 bits."""

    def __init__(self, model: ModelSection) -> None:
        dtype = getattr(torch, model.dtype)
        self.config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
        )
        """What transformers is to do with the weights that it reads."""

    def lay_out(self, base: PreTrainedModel) -> None:
        """Put layers of 4 bits in place of all linear ones but the head, without storage."""
        head = base.get_output_embeddings()
        names = [name for name, module in base.named_modules() if module is head]
        replace_with_bnb_linear(base, names, self.config)
        base.is_loaded_in_4bit = True  # pyright: ignore[reportArgumentType] - PEFT asks for it

    def check_layers(self, model: nn.Module) -> None:
        """Raise ValueError for a layer that bitsandbytes unpacks wrongly on a CPU: one whose rows
        do not fill blocks. And keep it from packing the others anew, for CPUs, on the first forward
        without gradient: from then on they would have none."""
        for name, layer in _layers(model):
            if layer.in_features % BLOCK:
                raise ValueError(
                    f"{name!r} has {layer.in_features} inputs, and nf4 needs a multiple of {BLOCK}"
                )
            layer.support_avx512bf16_for_cpu = False

    def packed_layers(self, model: nn.Module) -> dict[str, LayerQuantizer]:
        """Give the weights of the layers the shape that they have when they are packed, still
        without storage; who packs each, by its name."""
        self.check_layers(model)
        for _, layer in _layers(model):
            packed = layer.weight.numel() * BITS // (8 * layer.quant_storage.itemsize)
            weight = torch.empty(packed, 1, dtype=layer.quant_storage, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
        return {f"{name}.weight": LayerQuantizer(layer) for name, layer in _layers(model)}


def _layers(model: nn.Module) -> list[tuple[str, Linear4bit]]:
    named = model.named_modules()
    return [(name, module) for name, module in named if isinstance(module, Linear4bit)]
