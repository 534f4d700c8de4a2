"""The policy as the trainer computes with it: a frozen base model that carries a LoRA adapter.

The adapter exists twice. The masters are float32 and belong to the trainer's state; the copies in
the model, in the model's own type, are what forward and backward use and what is published. Nothing
is ever merged into the base.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.contracts.run_spec import LoraSection, ModelSection
from offbeat.errors import PermanentJobError
from services.trainer.base_model import divided_model, whole_model
from services.trainer.faithful import smallest_batch
from services.trainer.model import Model, Tensors
from services.trainer.ranks import Ranks, collective
from services.trainer.weight_files import OpenWeights, weights_of_folder

T = TypeVar("T")


class Policy(Model):
    """One base model and, at any time, the copies of one adapter, whose tensors have PEFT's names:
    `base_model.model. ... .q_proj.lora_A.weight`."""

    def __init__(self, model: PeftModel, device: torch.device, ranks: Ranks) -> None:
        base = cast(PreTrainedModel, model.get_base_model())
        self._frozen_head_VD = cast(nn.Linear, base.get_output_embeddings()).weight.detach()
        super().__init__(base, self._frozen_head_VD.dtype, device, ranks)
        self._adapted = model
        self.config = cast(LoraConfig, model.peft_config["default"])
        self.copies: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._sums: dict[str, Tensor] = {}
        self._installed: Tensors | None = None

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
            if ranks.divides(offload=offload):
                mesh = ranks.shard_mesh(device)
                adapted = divided_model(
                    folder, model, lora, device, mesh, open_weights, offload=offload
                )
            else:
                adapted = whole_model(folder, model, lora, device)
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

    @torch.no_grad()
    def install(self, masters: Tensors) -> None:
        """Make the copies equal to these weights, rounded to the model's type. What was installed
        last need not be sent to the other ranks again."""
        if masters is self._installed:
            return
        self._installed = None
        for name, copy in self.copies.items():
            copy.copy_(masters[name])
        self._share_copies()
        self._installed = masters

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Compute with the base model alone, without gradients."""
        with self._adapted.disable_adapter(), torch.no_grad():
            yield

    @collective
    def gradients(self) -> dict[str, Tensor]:
        """The gradient that all ranks have added up in the step, float32; complete at rank 0."""
        self.ranks.add_up(self._sums.values())
        return self._sums

    @collective
    def _share_copies(self) -> None:
        self.ranks.broadcast(copy.data for copy in self.copies.values())

    def _within(self, compute: Callable[[], T]) -> T:
        return compute()

    def _head_VD(self) -> Tensor:
        return self._frozen_head_VD

    def _add_gradient(self, part: Tensor, *, is_last: bool) -> None:
        part.backward()
        for name, copy in self.copies.items():
            if copy.grad is not None:
                self._sums[name].add_(copy.grad)
                copy.grad = None

    def _forget_gradient(self) -> None:
        self._sums = {
            name: torch.zeros(shape, device=self.device) for name, shape in self.shapes.items()
        }
        self._adapted.zero_grad()

    def _refuse_experts(self) -> None:
        for name in self.copies:
            if ".experts." in name:
                raise PermanentJobError(
                    f"{name!r} is LoRA on an expert, which engines lay out differently: "
                    "list lora.target_modules without the experts"
                )
