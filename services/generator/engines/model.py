"""A base model that computes with any adapter, chosen anew for each forward.

PEFT would give each adapter 210 modules of its own in a model of 30 layers, which takes 0.3 s to
add and 25 ms to switch. Here an adapter is only a table of tensors, and a hook on every linear
layer looks its factors up; the arithmetic and its order are PEFT's.
"""

from functools import partial
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from offbeat.errors import PermanentJobError
from services.generator.engines.adapter import Adapter, read_adapter
from services.generator.engines.attention import use_grouped_attention


class LoraModel:
    """Not thread-safe: one forward at a time. Loading adapters beside it is safe."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.requires_grad_(False).eval()
        self.device, self.dtype = model.device, model.dtype
        head = cast(nn.Linear, model.get_output_embeddings())
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        for name, layer in self._layers.items():
            layer.register_forward_hook(partial(self._add_adapter, name))
        model.set_output_embeddings(Float32Head(head))
        self._adapter: Adapter | None = None

    @classmethod
    def open(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Read the base model from its folder."""
        on_cpu = device.type == "cpu"
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager" if on_cpu else "sdpa",
                local_files_only=True,
            )
        except (OSError, ValueError) as error:
            raise PermanentJobError(f"the base model does not load: {error}") from error
        if on_cpu:
            use_grouped_attention(model)
        return cls(model.to(device))  # pyright: ignore[reportArgumentType] - as transformers has it

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a completion, from the model's two configurations."""
        ids: set[int] = set()
        for config in (self._model.generation_config, self._model.config):
            found: int | list[int] | None = getattr(config, "eos_token_id", None)
            ids |= {found} if isinstance(found, int) else set(found or ())
        return frozenset(ids)

    def new_cache(self) -> Cache:
        """An empty cache of keys and values for one batch."""
        return DynamicCache(config=self._model.config)

    def read_adapter(self, folder: Path) -> Adapter:
        """The adapter of a PEFT folder in the type of the model; `IntegrityError` if it does not
        fit."""
        saved = read_adapter(folder, self._layers)
        return Adapter(
            factors={
                name: (a_RI.to(self.device, self.dtype), b_OR.to(self.device, self.dtype))
                for name, (a_RI, b_OR) in saved.factors.items()
            },
            scaling=saved.scaling,
        )

    def next_logits(
        self,
        adapter: Adapter,
        ids_NT: Tensor,
        mask_NT: Tensor,
        positions_NT: Tensor,
        cache: Cache,
        *,
        num_last: int = 1,
    ) -> Tensor:
        """Logits after each of the last L tokens, (N, L, V) in float32; the cache grows by T.

        `mask_NT` covers the cache too, and is 0 on padding, which must be on the left.
        """
        self._adapter = adapter
        output = self._model(
            input_ids=ids_NT,
            attention_mask=mask_NT,
            position_ids=positions_NT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_last,
        )
        return cast(Tensor, output.logits)

    def _add_adapter(
        self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        assert self._adapter is not None
        factors = self._adapter.factors.get(name)
        if factors is None:
            return output
        a_RI, b_OR = factors
        return output + linear(linear(inputs[0], a_RI), b_OR) * self._adapter.scaling


class Float32Head(nn.Module):
    """The head in float32, since bfloat16 logits are off by up to 1/16 nat; so is the trainer's.

    On a CPU oneDNN keeps the weights in its own blocked order, as torch.compile would: torch's
    plain float32 product takes twice as long, and was a quarter of a step.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._weight_VD = head.weight.detach().float()
        self._bias_V = None if head.bias is None else head.bias.detach().float()
        self._is_packed = head.weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        if self._is_packed:
            self._weight_VD = torch.ops.mkldnn._reorder_linear_weight(self._weight_VD)

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 logits of states of any type."""
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(
                hidden.float(), self._weight_VD, self._bias_V, "none", [], ""
            )
        return linear(hidden.float(), self._weight_VD, self._bias_V)
