"""A model as the trainer computes with it, on whatever number of ranks: packed rows in, scores out.

Every forward goes over packed rows with an explicit mask and explicit positions: without them a
model silently lets one completion see another.

What of it is trained differs: an adapter on a frozen base in `policy.py`, all its weights in
`full_model.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Self, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.algorithms.cross_entropy import TargetScores, cross_entropy
from offbeat.algorithms.logprobs import completion_logprobs, float_logits
from offbeat.algorithms.packing import PackedTokens
from offbeat.errors import PermanentJobError
from services.trainer.attention import row_layouts, use_packed_attention
from services.trainer.faithful import (
    PACKING_ERROR_MAX,
    ShapeClass,
    packing_error,
    shape_class,
)
from services.trainer.ranks import Ranks, collective

B = TypeVar("B", bound=PackedTokens)
M = TypeVar("M", bound="Model")
R = TypeVar("R")
T = TypeVar("T")
Tensors = Mapping[str, Tensor]
"""Trained weights, or what belongs to each, by name."""
Checkpointing = bool | Literal["auto"]
"""Whether activations are computed again in the backward."""

CHECKPOINTING_PARAMETERS_MIN = 1_000_000_000
"""Smaller models have room to keep their activations."""
RANK_STRIDE = 15_485_863
"""Keeps the dropout of the ranks apart."""


class Model(ABC):
    """One model; on several ranks, one for all of them, as one of them holds it."""

    def __init__(
        self, base: PreTrainedModel, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        self.ranks = ranks
        self.dtype, self.device = dtype, device
        self._base = base
        self._is_sparse = device.type == "cpu" and use_packed_attention(base)
        self._checked_shapes: set[ShapeClass] = set()

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """What rank 0 has to know of the gradient that all ranks have added up in the step."""

    @abstractmethod
    def _within(self, compute: Callable[[], T]) -> T:
        """Compute while the weights are there that all blocks share."""

    @abstractmethod
    def _head_VD(self) -> Tensor:
        """The weights of the head, within such a computation."""

    @abstractmethod
    def _add_gradient(self, part: Tensor, *, is_last: bool) -> None:
        """Add the gradient of this rank's part of the loss to what there is of the step's, which
        is all of it with the last one."""

    @abstractmethod
    def _forget_gradient(self) -> None:
        """Before a step."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text; none where neither configuration names one."""
        for config in (self._base.generation_config, self._base.config):
            ids: int | list[int] | None = getattr(config, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @contextmanager
    def training(self, checkpointing: Checkpointing, seed: int) -> Iterator[None]:
        """Apply LoRA dropout, drawn from the seed; recompute activations where that is asked."""
        self._begin(checkpointing, seed)
        try:
            yield
        finally:
            self._end()

    @collective
    def backward(
        self,
        term: Callable[[Self, B], tuple[Tensor, R]],
        batches: Sequence[B],
        is_last: bool,
    ) -> list[tuple[float, R]]:
        """Add the gradient of a micro-batch on each rank to the step's; what `term` gave for
        each."""
        own, is_counted = self._own(batches)
        part, record = term(self, own)
        self._add_gradient(part * is_counted, is_last=is_last)
        return self._seen(part.item(), record, batches)

    @collective
    def forward(
        self, term: Callable[[Self, B], tuple[Tensor, R]], batches: Sequence[B]
    ) -> list[tuple[float, R]]:
        """What `term` gives for a micro-batch on each rank, without a gradient."""
        own, _ = self._own(batches)
        with torch.no_grad():
            part, record = term(self, own)
        return self._seen(part.item(), record, batches)

    def logprobs(self, batch: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
        """log pi of every target and the entropy of its distribution, both float32."""
        return self._within(
            lambda: completion_logprobs(
                self._hidden_ND(batch), self._head_VD(), batch.targets_N, temperature=temperature
            )
        )

    def target_scores(self, batch: PackedTokens) -> TargetScores:
        """The cross-entropy of every target, and what there is to see beside it."""
        return self._within(
            lambda: cross_entropy(self._hidden_ND(batch), self._head_VD(), batch.targets_N)
        )

    @collective
    @torch.no_grad()
    def distributions(self, batch: PackedTokens) -> Tensor:
        """log pi of every token of the vocabulary where a target is predicted: (N, V), float32."""
        self._refuse_beyond_window(batch)
        return self._within(lambda: self._log_softmax_NV(batch.to(self.device)))

    @collective
    @torch.no_grad()
    def plain_distributions(self, ids: tuple[int, ...], num_last: int) -> Tensor:
        """log pi of every token at the last places of a sequence, as the model itself computes
        it: (num_last, V), float32."""
        ids_BT = torch.tensor([ids], device=self.device)
        attention = cast(str, self._base.config._attn_implementation)  # pyright: ignore[reportPrivateUsage]
        self._base.set_attn_implementation("eager")
        try:
            logits_BTV: Tensor = self._within(
                lambda: (
                    self._base(
                        input_ids=ids_BT, use_cache=False, logits_to_keep=num_last + 1
                    ).logits
                )
            )
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
    def _begin(self, checkpointing: Checkpointing, seed: int) -> None:
        if checkpointing == "auto":
            checkpointing = self._base.num_parameters() >= CHECKPOINTING_PARAMETERS_MIN
        if checkpointing:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed((seed + self.ranks.rank * RANK_STRIDE) % 2**63)
        self._forget_gradient()
        self._base.train()

    @collective
    def _end(self) -> None:
        self._base.eval()
        self._base.gradient_checkpointing_disable()

    def _own(self, batches: Sequence[B]) -> tuple[B, bool]:
        """This rank's micro-batch. One without any takes part in the others' collectives with the
        first one, which it does not count."""
        rank = self.ranks.rank
        is_counted = rank < len(batches)
        return batches[rank if is_counted else 0].to(self.device), is_counted

    def _seen(self, part: float, record: R, batches: Sequence[B]) -> list[tuple[float, R]]:
        return self.ranks.gathered((part, record))[: len(batches)]

    def _log_softmax_NV(self, batch: PackedTokens) -> Tensor:
        hidden_ND, head_VD = self._hidden_ND(batch), self._head_VD()
        logits_NV = hidden_ND.new_empty(len(hidden_ND), len(head_VD), dtype=torch.float32)
        return float_logits(hidden_ND, head_VD, logits_NV).log_softmax(-1)

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


Term = Callable[[M, B], tuple[Tensor, R]]
"""What a micro-batch adds to the loss of the whole step, and a record of what was seen. It is sent
to the other ranks, so it is data, and no closure."""
