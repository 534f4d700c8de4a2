"""The policy as the trainer computes with it: a frozen base model that carries a LoRA adapter.

The adapter exists twice. The masters are float32 and belong to the trainer's state; the copies in
the model, in the model's own type, are what forward and backward use and what is published. Nothing
is ever merged into the base.

Every forward goes over packed rows with an explicit mask and explicit positions: without them a
model silently lets one completion see another.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self, TypeVar, cast

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.algorithms.cross_entropy import TargetScores, cross_entropy
from offbeat.algorithms.logprobs import completion_logprobs, float_logits
from offbeat.algorithms.packing import PackedTokens
from offbeat.contracts.run_spec import LoraSection, ModelSection
from offbeat.errors import PermanentJobError
from services.trainer.attention import row_layouts, use_packed_attention
from services.trainer.base_model import divided_model, whole_model
from services.trainer.faithful import (
    PACKING_ERROR_MAX,
    ShapeClass,
    packing_error,
    shape_class,
    smallest_batch,
)
from services.trainer.ranks import Ranks, collective
from services.trainer.weight_files import OpenWeights, weights_of_folder

B = TypeVar("B", bound=PackedTokens)
R = TypeVar("R")
Tensors = Mapping[str, Tensor]
"""Adapter tensors under PEFT's names: `base_model.model. ... .q_proj.lora_A.weight`."""

CHECKPOINTING_PARAMETERS_MIN = 1_000_000_000
"""Smaller models have room to keep their activations."""
RANK_STRIDE = 15_485_863
"""Keeps the dropout of the ranks apart."""


class Policy:
    """One base model and, at any time, the copies of one adapter; on several ranks, one for all of
    them, as one of them holds it."""

    def __init__(self, model: PeftModel, device: torch.device, ranks: Ranks) -> None:
        self.ranks = ranks
        self._model = model
        self._base = cast(PreTrainedModel, model.get_base_model())
        self.config = cast(LoraConfig, model.peft_config["default"])
        self.copies: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._head_VD = cast(nn.Linear, self._base.get_output_embeddings()).weight.detach()
        self.dtype, self.device = self._head_VD.dtype, device
        self._is_sparse = self.device.type == "cpu" and use_packed_attention(self._base)
        self._checked_shapes: set[ShapeClass] = set()
        self._sums: dict[str, Tensor] = {}

    @classmethod
    def load(
        cls,
        folder: Path,
        model: ModelSection,
        lora: LoraSection,
        device: torch.device,
        ranks: Ranks | None = None,
        open_weights: OpenWeights = weights_of_folder,
        *,
        offload: bool = False,
    ) -> Self:
        """Read the base model, or this rank's part of it, and put an adapter on it whose weights
        are not the run's yet."""
        ranks = ranks or Ranks()
        try:
            if ranks.mesh is None:
                adapted = whole_model(folder, model, lora, device)
            else:
                adapted = divided_model(
                    folder, model, lora, device, ranks.mesh, open_weights, offload=offload
                )
        except (OSError, ValueError) as error:
            raise PermanentJobError(f"model {model.id!r} cannot be trained: {error}") from error
        policy = cls(adapted.eval(), device, ranks)
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
        self._share_copies()

    @contextmanager
    def training(self, checkpointing: bool | Literal["auto"], seed: int) -> Iterator[None]:
        """Apply LoRA dropout, drawn from the seed; recompute activations where that is asked."""
        self._begin(checkpointing, seed)
        try:
            yield
        finally:
            self._end()

    @collective
    def backward(self, term: "Term[B, R]", batches: Sequence[B]) -> list[tuple[float, R]]:
        """Add the gradient of a micro-batch on each rank to the sums; what `term` gave for each."""
        own, is_counted = self._own(batches)
        part, record = term(self, own)
        (part * is_counted).backward()
        for name, copy in self.copies.items():
            if copy.grad is not None:
                self._sums[name].add_(copy.grad)
                copy.grad = None
        return self._seen(part.item(), record, batches)

    @collective
    def forward(self, term: "Term[B, R]", batches: Sequence[B]) -> list[tuple[float, R]]:
        """What `term` gives for a micro-batch on each rank, without a gradient."""
        own, _ = self._own(batches)
        with torch.no_grad():
            part, record = term(self, own)
        return self._seen(part.item(), record, batches)

    @collective
    def gradients(self) -> dict[str, Tensor]:
        """The gradient that all ranks have added up in the step, float32; complete at rank 0."""
        self.ranks.add_up(self._sums.values())
        return self._sums

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

    @collective
    @torch.no_grad()
    def distributions(self, batch: PackedTokens) -> Tensor:
        """log pi of every token of the vocabulary where a target is predicted: (N, V), float32."""
        self._refuse_beyond_window(batch)
        hidden_ND = self._hidden_ND(batch.to(self.device))
        logits_NV = hidden_ND.new_empty(len(hidden_ND), len(self._head_VD), dtype=torch.float32)
        return float_logits(hidden_ND, self._head_VD, logits_NV).log_softmax(-1)

    @collective
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
        """Raise `PermanentJobError` where a sequence is too long, or the model computes a packed
        batch of this shape class otherwise than a sequence by itself. Looks at the first batch of
        each class."""
        self._refuse_beyond_window(batch)
        if shape_class(batch) not in self._checked_shapes:
            self._compare_packing(batch)

    @collective
    def _compare_packing(self, batch: PackedTokens) -> None:
        error = packing_error(self, batch)
        if math.isnan(error):
            return  # There is nothing to compare: the loss will say so.
        if error > PACKING_ERROR_MAX:
            raise PermanentJobError(
                f"the model {type(self._base).__name__} transforms its logits or attention in a "
                f"way that the trainer does not know (relative error {error:.3f}): use another one"
            )
        self._checked_shapes.add(shape_class(batch))

    @collective
    def _share_copies(self) -> None:
        self.ranks.broadcast(copy.data for copy in self.copies.values())

    @collective
    def _begin(self, checkpointing: bool | Literal["auto"], seed: int) -> None:
        if checkpointing == "auto":
            checkpointing = self._base.num_parameters() >= CHECKPOINTING_PARAMETERS_MIN
        if checkpointing:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})
        self._sums = {
            name: torch.zeros(shape, device=self.device) for name, shape in self.shapes.items()
        }
        torch.manual_seed((seed + self.ranks.rank * RANK_STRIDE) % 2**63)
        self._model.zero_grad()
        self._model.train()

    @collective
    def _end(self) -> None:
        self._model.eval()
        self._base.gradient_checkpointing_disable()

    def _own(self, batches: Sequence[B]) -> tuple[B, bool]:
        """This rank's micro-batch. One without any takes part in the others' collectives with the
        first one, which it does not count."""
        rank = self.ranks.rank
        is_counted = rank < len(batches)
        return batches[rank if is_counted else 0].to(self.device), is_counted

    def _seen(self, part: float, record: R, batches: Sequence[B]) -> list[tuple[float, R]]:
        return self.ranks.gathered((part, record))[: len(batches)]

    def _hidden_ND(self, batch: PackedTokens) -> Tensor:
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

    def _refuse_beyond_window(self, batch: PackedTokens) -> None:
        num_tokens = int(batch.positions_BT.max()) + 1
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


Term = Callable[[Policy, B], tuple[Tensor, R]]
"""What a micro-batch adds to the loss of the whole step, and a record of what was seen. It is sent
to the other ranks, so it is data, and no closure."""
