"""A model all of whose weights are trained, divided among the ranks with its gradient and AdamW's
moments: 16 bytes of each weight over the number of ranks (ZeRO 3, arXiv 1910.02054, by FSDP2).

Masters are float32 and are what FSDP2 divides; what is gathered to compute with has the model's
type, and gradients are added up in float32. The update changes them in place: a second copy would
be as large again. So there is one version at a time, and who needs another one restores it.

Embeddings, last norm and head are one unit, whose weights are there while `_within` computes.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import STATE_INDEX, Manifest, VersionFile
from offbeat.errors import OffbeatError, PermanentJobError, WorkerError
from offbeat.models import load_tokenizer
from offbeat.objects import ObjectStore
from services.trainer import checkpoint
from services.trainer.base_model import (
    blocks_of,
    laid_out,
    offload_policy,
    own_range,
    part_of,
    rows_of,
)
from services.trainer.faithful import smallest_batch
from services.trainer.model import Model
from services.trainer.model_folder import split_of, write_rest, write_weights
from services.trainer.ranks import Ranks, collective
from services.trainer.sharded_state import StateReader, StateWriter
from services.trainer.weight_files import OpenWeights

T = TypeVar("T")


class Within(nn.Module):
    """The unit that FSDP2 gathers around all blocks; its forward is whatever is computed."""

    def __init__(self, base: PreTrainedModel) -> None:
        super().__init__()
        self.base = base

    def forward(self, compute: Callable[[], T]) -> T:
        """Compute."""
        return compute()


class InPlace(BlockingAsyncStager):
    """Copies nothing, for a state that waits until it is saved."""

    def stage(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors themselves."""
        return state_dict


class FullModel(Model):
    """The weights of one version and their moments, as one rank holds its part of them."""

    def __init__(
        self,
        base: PreTrainedModel,
        root: Within,
        model: ModelSection,
        folder: Path,
        device: torch.device,
        ranks: Ranks,
        open_weights: OpenWeights,
        store: ObjectStore,
        *,
        offload: bool,
    ) -> None:
        super().__init__(base, getattr(torch, model.dtype), device, ranks)
        self.num_updates = 0
        self._root, self._section, self._folder = root, model, folder
        self._open_weights, self._store, self._is_offloaded = open_weights, store, offload
        self._weights = cast(dict[str, DTensor], dict(base.named_parameters()))
        self._optimizer = _optimizer(self._weights)
        self._saving: Future[object] | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        model: ModelSection,
        device: torch.device,
        ranks: Ranks,
        open_weights: OpenWeights,
        store: ObjectStore,
        *,
        offload: bool = False,
    ) -> Self:
        """Read this rank's part of the base model."""
        try:
            base = laid_out(folder, torch.float32, device)
            mesh = ranks.training_mesh(device)
            root = _divided(base, mesh, getattr(torch, model.dtype), offload=offload)
            _give_storage(base, torch.device("cpu") if offload else device)
            loaded = cls(
                base.eval(),
                root,
                model,
                folder,
                device,
                ranks,
                open_weights,
                store,
                offload=offload,
            )
        except (OSError, ValueError) as error:
            raise PermanentJobError(f"model {model.id!r} cannot be trained: {error}") from error
        loaded._read_base()
        loaded.check_packing(smallest_batch())
        return loaded

    def begin_anew(self) -> None:
        """Be the base model, which it is as long as there was no update."""
        if self.num_updates:
            self._read_base()

    @collective
    @torch.no_grad()
    def _read_base(self) -> None:
        try:
            with self._open_weights(self._folder) as files:
                for name, weight in self._weights.items():
                    rows, own = rows_of(files, name, list(weight.shape)), own_range(weight)
                    if own.start < own.stop:
                        weight.to_local().copy_(rows[own])
        except (OSError, ValueError) as error:
            raise PermanentJobError(
                f"model {self._section.id!r} cannot be trained: {error}"
            ) from error
        for moments in self._optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()
        self.num_updates = 0

    def gradients(self) -> dict[str, Tensor]:
        """None that rank 0 has to know: each rank keeps its own part."""
        return {}

    @collective
    def update(self, rate: float, weight_decay: float, norm_max: float) -> float:
        """One step of `torch.optim.AdamW` with the gradient of the step, scaled down to a norm of
        `norm_max`. Returns the norm before; where that is not finite, nothing is changed.

        Weights of one dimension, as those of norms, do not decay.
        """
        weights = list(self._weights.values())
        total = get_total_norm([weight.grad for weight in weights if weight.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if norm.isfinite():
            clip_grads_with_norm_(weights, norm_max, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
                group["weight_decay"] = weight_decay if group["decays"] else 0.0
            self.num_updates += 1  # Whatever happens within the next line, it is no base model.
            self._optimizer.step()
        self._forget_gradient()
        return float(norm)

    @collective
    def save(self, prefix: str) -> Callable[[], tuple[VersionFile, ...]]:
        """Copy the state to host memory, and have all ranks upload it beside what comes next. What
        is offloaded fills that memory already, and is uploaded at once.

        What is returned waits for that, at rank 0, and says what was written. One state is on its
        way at a time.
        """
        if self._saving is not None:
            self._saving.exception()  # Whoever published that version has heard of it.
        writer = StateWriter(self._store, prefix)
        saving = async_save(
            self._state(),
            storage_writer=writer,
            process_group=self.ranks.saves,
            async_stager=InPlace() if self._is_offloaded else None,
        )
        self._saving = cast(Future[object], saving)
        if self._is_offloaded:
            self._saving.exception()
        return lambda: _saved(self._store, prefix, writer, cast(Future[object], saving))

    @collective
    @torch.no_grad()
    def restore(self, manifest: Manifest, num_updates: int) -> None:
        """Be this version, whose state was saved, on whatever number of ranks that was."""
        self.num_updates = num_updates  # A state that is read in part is no base model either.
        try:
            load(self._state(), storage_reader=StateReader(self._store, manifest))
        except CheckpointException as error:
            raise _first_failure(error) from error
        for moments in self._optimizer.state.values():
            moments["step"].fill_(num_updates)

    @collective
    def write_folder(self, prefix: str) -> tuple[VersionFile, ...]:
        """Write the model to the store as `from_pretrained` reads it; at rank 0, what was
        written."""
        put = partial(checkpoint.put, self._store, prefix)
        split = split_of(self._weights, self.dtype)
        files = write_weights(put, split, self._weights, self.dtype, self.ranks)
        if self.ranks.rank > 0:
            return ()
        tokenizer = load_tokenizer(self._folder, self._section.chat_template)
        return (*files, *write_rest(put, split, self._base, self.dtype, tokenizer))

    def _state(self) -> dict[str, Tensor]:
        """Masters and moments, under the names that they have in the store."""
        state: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            moments = self._optimizer.state[weight]
            state[f"masters.{name}"] = weight.detach()
            state |= {f"{field}.{name}": moments[field] for field in ("exp_avg", "exp_avg_sq")}
        return state

    def _within(self, compute: Callable[[], T]) -> T:
        result = self._root(compute)
        if not torch.is_grad_enabled():
            # A backward would give back what was gathered. What stays would be computed with again
            # after the next update.
            cast(FSDPModule, self._root).reshard()
        return result

    def _head_VD(self) -> Tensor:
        return cast(nn.Linear, self._base.get_output_embeddings()).weight

    def _add_gradient(self, part: Tensor, *, is_last: bool) -> None:
        # What copies of the model have to tell one another they do once a step.
        cast(FSDPModule, self._root).set_requires_all_reduce(is_last)
        # FSDP2 takes the mean over all ranks.
        (part * self.ranks.size).backward()

    def _forget_gradient(self) -> None:
        self._optimizer.zero_grad()


def _divided(
    base: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool
) -> Within:
    """Block by block, and the rest as one unit."""
    root = Within(base)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*blocks_of(base), root):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload_policy(mesh, offload=offload),
        )
    return root


def _give_storage(base: PreTrainedModel, device: torch.device) -> None:
    """The buffers have theirs, and `to_empty` would take what is in them."""
    parts: dict[str, Tensor] = {}
    for name, weight in base.named_parameters():
        assert isinstance(weight, DTensor)
        parts[name] = part_of(weight, torch.empty(weight.to_local().shape, device=device))
    base.load_state_dict(parts, strict=False, assign=True)
    base.tie_weights()


def _optimizer(weights: dict[str, DTensor]) -> torch.optim.AdamW:
    """With its moments, so that there is a state before the first update."""
    matrices = [weight for weight in weights.values() if weight.ndim > 1]
    others = [weight for weight in weights.values() if weight.ndim <= 1]
    groups = [{"params": matrices, "decays": True}, {"params": others, "decays": False}]
    # Weight by weight: an update of all at once has temporary tensors as large as all of them.
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], foreach=False)
    for weight in weights.values():
        optimizer.state[weight] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return optimizer


def _saved(
    store: ObjectStore, prefix: str, writer: StateWriter, saving: Future[object]
) -> tuple[VersionFile, ...]:
    try:
        saving.result()
    except CheckpointException as error:
        raise _first_failure(error) from error
    index = writer.index.model_dump_json().encode()
    return (*writer.files, checkpoint.put(store, prefix, STATE_INDEX, index))


def _first_failure(error: CheckpointException) -> Exception:
    """What the first rank that failed has met; torch's own exception would end the process."""
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    if isinstance(failure, OffbeatError):
        return failure
    return WorkerError(f"rank {rank} cannot save or load the state: {failure!r}")
