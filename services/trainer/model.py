"""The policy as the trainer computes with it: a frozen base model that carries a LoRA adapter.

The adapter exists twice. The masters are float32 and belong to the trainer's state; the copies in
the model, in the model's own type, are what forward and backward use and what is published. Nothing
is ever merged into the base.

Every forward goes over packed rows with an explicit mask and explicit positions: without them a
model silently lets one completion see another.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.algorithms.cross_entropy import TargetScores, cross_entropy
from offbeat.algorithms.logprobs import completion_logprobs, float_logits
from offbeat.algorithms.packing import PackedTokens
from offbeat.contracts.run_spec import LoraSection, ModelSection
from offbeat.errors import PermanentJobError
from services.trainer.attention import row_layouts, use_packed_attention
from services.trainer.faithful import (
    PACKING_ERROR_MAX,
    ShapeClass,
    packing_error,
    shape_class,
    smallest_batch,
)

Tensors = Mapping[str, Tensor]
"""Adapter tensors under PEFT's names: `base_model.model. ... .q_proj.lora_A.weight`."""

CHECKPOINTING_PARAMETERS_MIN = 1_000_000_000
"""Smaller models have room to keep their activations."""


class Policy:
    """One base model and, at any time, the copies of one adapter."""

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        self._base = cast(PreTrainedModel, model.get_base_model())
        self.config = cast(LoraConfig, model.peft_config["default"])
        self.copies: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._head_VD = cast(nn.Linear, self._base.get_output_embeddings()).weight.detach()
        self.dtype, self.device = self._head_VD.dtype, self._head_VD.device
        self._is_sparse = self.device.type == "cpu" and use_packed_attention(self._base)
        self._checked_shapes: set[ShapeClass] = set()

    @classmethod
    def load(
        cls, folder: Path, model: ModelSection, lora: LoraSection, device: torch.device
    ) -> Self:
        """Read the base model and put an adapter on it whose weights are not the run's yet."""
        try:
            base = _load_base(folder, model, device)
            adapted = get_peft_model(base, _lora_config(lora), autocast_adapter_dtype=False)
        except (OSError, ValueError) as error:
            raise PermanentJobError(f"model {model.id!r} cannot be trained: {error}") from error
        policy = cls(cast(PeftModel, adapted.to(device).eval()))
        policy.config.base_model_name_or_path, policy.config.revision = model.id, model.revision
        policy._refuse_experts()
        policy.check_packing(smallest_batch())
        return policy

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every adapter tensor."""
        return {name: copy.shape for name, copy in self.copies.items()}

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of the modules that carry LoRA."""
        return tuple(sorted(cast(set[str], self.config.target_modules)))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text; none where neither configuration names one."""
        for config in (self._base.generation_config, self._base.config):
            ids: int | list[int] | None = getattr(config, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @torch.no_grad()
    def install(self, masters: Tensors) -> None:
        """Make the copies equal to these weights, rounded to the model's type."""
        for name, copy in self.copies.items():
            copy.copy_(masters[name])

    @contextmanager
    def training(self, checkpointing: bool | Literal["auto"], seed: int) -> Iterator[None]:
        """Apply LoRA dropout, drawn from the seed; recompute activations where that is asked."""
        if checkpointing == "auto":
            checkpointing = self._base.num_parameters() >= CHECKPOINTING_PARAMETERS_MIN
        if checkpointing:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(seed)
        self._model.zero_grad()
        self._model.train()
        try:
            yield
        finally:
            self._model.eval()
            self._base.gradient_checkpointing_disable()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute with the base model alone, without gradients."""
        with self._model.disable_adapter(), torch.no_grad():
            yield

    def logprobs(self, batch: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
        """log pi of every target and the entropy of its distribution, both float32."""
        return completion_logprobs(
            self._hidden_ND(batch),
            self._head_VD,
            batch.targets_N,
            temperature=temperature,
        )

    def target_scores(self, batch: PackedTokens) -> TargetScores:
        """The cross-entropy of every target, and what there is to see beside it."""
        return cross_entropy(self._hidden_ND(batch), self._head_VD, batch.targets_N)

    @torch.no_grad()
    def distributions(self, batch: PackedTokens) -> Tensor:
        """log pi of every token of the vocabulary where a target is predicted: (N, V), float32."""
        hidden_ND = self._hidden_ND(batch)
        logits_NV = hidden_ND.new_empty(len(hidden_ND), len(self._head_VD), dtype=torch.float32)
        return float_logits(hidden_ND, self._head_VD, logits_NV).log_softmax(-1)

    @torch.no_grad()
    def take_gradients(self, sums: Tensors) -> None:
        """Add the gradients of the copies to float32 sums and clear them."""
        for name, copy in self.copies.items():
            if copy.grad is not None:
                sums[name].add_(copy.grad)
                copy.grad = None

    @torch.no_grad()
    def plain_distributions(self, ids: tuple[int, ...], num_last: int) -> Tensor:
        """log pi of every token at the last places of a sequence, as the model itself computes
        it: (num_last, V), float32."""
        ids_BT = torch.tensor([ids], device=self.device)
        attention = cast(str, self._base.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]
        self._base.set_attn_implementation("eager")
        try:
            logits_BTV: Tensor = self._model(
                input_ids=ids_BT, use_cache=False, logits_to_keep=num_last + 1
            ).logits
        finally:
            self._base.set_attn_implementation(attention)
        return logits_BTV[0, -num_last - 1 : -1].float().log_softmax(-1)

    def check_packing(self, batch: PackedTokens) -> None:
        """Raise `PermanentJobError` where the model computes a packed batch of this shape class
        otherwise than a sequence by itself. Looks at the first batch of each class."""
        if (shape := shape_class(batch)) in self._checked_shapes:
            return
        error = packing_error(self, batch.to(self.device))
        if math.isnan(error):
            return  # There is nothing to compare: the loss will say so.
        if error > PACKING_ERROR_MAX:
            raise PermanentJobError(
                f"the model {type(self._base).__name__} transforms its logits or attention in a "
                f"way that the trainer does not know (relative error {error:.3f}): use another one"
            )
        self._checked_shapes.add(shape)

    def _hidden_ND(self, batch: PackedTokens) -> Tensor:
        self._refuse_beyond_window(int(batch.positions_BT.max()) + 1)
        hidden_BTD: Tensor = self._base.base_model(
            input_ids=batch.ids_BT,
            position_ids=batch.positions_BT,
            use_cache=False,
            **self._visibility(batch),
        ).last_hidden_state
        return hidden_BTD.flatten(0, 1)[batch.predictors_N]

    def _visibility(self, batch: PackedTokens) -> dict[str, object]:
        """What tells the model's attention which token may see which."""
        if self._is_sparse:
            return {"layouts": row_layouts(batch.segments_BT)}
        allowed_B1TT = batch.allowed_B1TT()
        mask_B1TT = torch.zeros(allowed_B1TT.shape, dtype=self.dtype, device=self.device)
        smallest = torch.finfo(self.dtype).min
        return {"attention_mask": mask_B1TT.masked_fill_(~allowed_B1TT, smallest)}

    def _refuse_beyond_window(self, num_tokens: int) -> None:
        window = getattr(self._base.config, "sliding_window", None)
        if window is not None and num_tokens > window:
            raise PermanentJobError(
                f"a sequence of {num_tokens} tokens exceeds the model's sliding window of "
                f"{window}, which the trainer does not know: lower rollout.max_new_tokens, or "
                "sft.max_length in a supervised run"
            )

    def _refuse_experts(self) -> None:
        for name in self.copies:
            if ".experts." in name:
                raise PermanentJobError(
                    f"{name!r} is LoRA on an expert, which engines lay out differently: "
                    "list lora.target_modules without the experts"
                )


def _load_base(folder: Path, model: ModelSection, device: torch.device) -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, model.dtype),
        # On CPUs packed attention takes its place, or the plain one where that cannot be.
        attn_implementation="eager" if device.type == "cpu" else "sdpa",
        local_files_only=True,
        output_loading_info=True,
    )
    base, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    if missing := report["missing_keys"]:
        # transformers would go on with random weights in their place.
        raise ValueError(f"its files lack {min(missing)!r}")
    base.requires_grad_(False)
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Engines sample without dropout.
    return base


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
