"""What a trainer keeps between jobs: one base model, and the state of the last version it made.

Both can be rebuilt from the store at any time. A state is used only for a version with exactly its
bytes, so a publish that another trainer won, or one that failed, needs no clean-up.
"""

from collections.abc import Callable
from pathlib import Path

import psutil
import structlog
import torch

from offbeat.contracts.run_spec import LoraSection, ModelSection, RunSpec
from offbeat.contracts.weights import Manifest
from offbeat.errors import InvalidRequestError
from offbeat.objects import ObjectStore
from offbeat.plan.auto import decided
from offbeat.plan.known_models import architecture_of
from services.trainer.full_model import FullModel
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks, collective
from services.trainer.state import TrainerState
from services.trainer.weight_files import OpenWeights, weights_of_folder

log = structlog.get_logger(__name__)


class Memory:
    """One model and one state at a time: a GPU has room for no more."""

    def __init__(
        self,
        resolve_model: Callable[[ModelSection], Path],
        device: torch.device,
        ranks: Ranks | None = None,
        open_weights: Callable[[ModelSection], OpenWeights] = lambda _: weights_of_folder,
        store: ObjectStore | None = None,
        *,
        offload: bool = False,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._open_weights = open_weights
        self._resolve_model = resolve_model
        self._device = device
        self._store = store
        self._offload = offload
        self._model: Policy | FullModel | None = None
        self._key: tuple[ModelSection, LoraSection | None] | None = None
        self._folder: Path | None = None
        self._state: TrainerState | None = None
        self._manifest: Manifest | None = None

    def folder(self, model: ModelSection) -> Path:
        """The files of a base model; fetched or converted on first use."""
        return self._resolve_model(model)

    def settled(self, spec: RunSpec) -> RunSpec:
        """The spec with what the plan chooses for this GPU in place of `auto`; on a CPU, and for a
        model of another build, as it is. The run's model is loaded."""
        if self._device.type != "cuda":
            return spec
        gpu_bytes = torch.cuda.get_device_properties(self._device).total_memory
        assert self._folder is not None, "a model is loaded before its step begins"
        try:
            return decided(
                spec, architecture_of(str(self._folder)), gpu_bytes, self.ranks.num_shards
            )
        except InvalidRequestError as error:
            log.info("No plan is made for this model.", reason=error.detail)
            return spec

    def policy(self, spec: RunSpec) -> Policy:
        """The policy of a run, loaded unless the last job's serves. Its copies are of any run."""
        lora = spec.adapter.model_copy(update={"init_from": None})
        policy = self._of(spec.model, lora)
        assert isinstance(policy, Policy)
        return policy

    def full_model(self, spec: RunSpec) -> FullModel:
        """The model of a run of full fine-tuning, loaded unless the last job's serves. Its weights
        are of any version; see `holds`."""
        model = self._of(spec.model, None)
        assert isinstance(model, FullModel)
        return model

    def follow(self) -> None:
        """Compute with rank 0 until it leaves."""
        self.ranks.follow({"Memory": lambda: self, "Policy": self.loaded, "FullModel": self.loaded})

    def loaded(self) -> Policy | FullModel:
        """The model that was loaded last."""
        assert self._model is not None, "a model is loaded before its step begins"
        return self._model

    def holds(self, manifest: Manifest) -> bool:
        """Whether what is held is of this version."""
        return self._manifest is not None and manifest.agrees_with(self._manifest)

    def state(self, manifest: Manifest) -> TrainerState | None:
        """The state of this version, if it is the one held."""
        return self._state if self.holds(manifest) else None

    def sealed(self, run_id: str, version: int) -> Manifest | None:
        """The manifest of this version, if its state is held: it may not be published yet."""
        held = self._manifest
        is_it = held is not None and (held.run_id, held.version) == (run_id, version)
        return held if is_it else None

    def keep(self, manifest: Manifest, state: TrainerState | None = None) -> None:
        """Hold the state of a sealed version, in place of any other. That of full fine-tuning is in
        the model."""
        self._manifest, self._state = manifest, state

    def forget(self) -> None:
        """Hold nothing: the state is about to change."""
        self._manifest, self._state = None, None

    def _of(self, model: ModelSection, lora: LoraSection | None) -> Policy | FullModel:
        if self._model is None or self._key != (model, lora):
            self.forget()
            # A store that does not answer here fails the job; within a call it ends the group.
            self._folder = self._resolve_model(model)
            self._load(model, lora)
            self._key = (model, lora)
        return self.loaded()

    @collective
    def _load(self, model: ModelSection, lora: LoraSection | None) -> None:
        self._model = None
        if self.ranks.rank > 0:
            self._folder = self._resolve_model(model)
        assert self._folder is not None, "rank 0 has resolved the model before"
        self._model = self._read(self._folder, model, lora)
        log.info(
            "Loaded a base model.",
            model=model.id,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            rss_mb=round(psutil.Process().memory_info().rss / 1e6),
        )

    def _read(
        self, folder: Path, model: ModelSection, lora: LoraSection | None
    ) -> Policy | FullModel:
        source, device, ranks = self._open_weights(model), self._device, self.ranks
        if lora is not None:
            return Policy.load(folder, model, lora, device, ranks, source, offload=self._offload)
        assert self._store is not None, "full fine-tuning writes to the store from every rank"
        return FullModel.load(
            folder, model, device, ranks, source, self._store, offload=self._offload
        )
