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
from offbeat.plan.auto import decided
from offbeat.plan.known_models import architecture_of
from services.trainer.model import Policy
from services.trainer.ranks import Ranks, collective
from services.trainer.state import TrainerState
from services.trainer.weight_files import OpenWeights, weights_of_folder

log = structlog.get_logger(__name__)


class Memory:
    """One policy and one state at a time: a GPU has room for no more."""

    def __init__(
        self,
        resolve_model: Callable[[ModelSection], Path],
        device: torch.device,
        ranks: Ranks | None = None,
        open_weights: Callable[[ModelSection], OpenWeights] = lambda _: weights_of_folder,
        *,
        offload: bool = False,
    ) -> None:
        self.ranks = ranks or Ranks()
        self._open_weights = open_weights
        self._resolve_model = resolve_model
        self._device = device
        self._offload = offload
        self._policy: Policy | None = None
        self._policy_key: tuple[ModelSection, LoraSection] | None = None
        self._policy_folder: Path | None = None
        self._state: TrainerState | None = None
        self._manifest: Manifest | None = None

    def folder(self, model: ModelSection) -> Path:
        """The files of a base model; fetched or converted on first use."""
        return self._resolve_model(model)

    def settled(self, spec: RunSpec) -> RunSpec:
        """The spec with what the plan chooses for this GPU in place of `auto`; on a CPU, and for a
        model of another build, as it is. The run's policy is loaded."""
        if self._device.type != "cuda":
            return spec
        gpu_bytes = torch.cuda.get_device_properties(self._device).total_memory
        assert self._policy_folder is not None, "a policy is loaded before its step begins"
        try:
            return decided(
                spec, architecture_of(str(self._policy_folder)), gpu_bytes, self.ranks.num_shards
            )
        except InvalidRequestError as error:
            log.info("No plan is made for this model.", reason=error.detail)
            return spec

    def policy(self, spec: RunSpec) -> Policy:
        """The policy of a run, loaded unless the last job's serves. Its copies are of any run."""
        key = (spec.model, spec.lora.model_copy(update={"init_from": None}))
        if self._policy is None or self._policy_key != key:
            self._state = None
            # A store that does not answer here fails the job; within a call it ends the group.
            self._policy_folder = self._resolve_model(spec.model)
            self._load(spec.model, spec.lora)
            self._policy_key = key
        return self.loaded()

    def follow(self) -> None:
        """Compute with rank 0 until it leaves."""
        self.ranks.follow({"Memory": lambda: self, "Policy": self.loaded})

    def loaded(self) -> Policy:
        """The policy that was loaded last."""
        assert self._policy is not None, "a policy is loaded before its step begins"
        return self._policy

    @collective
    def _load(self, model: ModelSection, lora: LoraSection) -> None:
        self._policy = None
        if self.ranks.rank > 0:
            self._policy_folder = self._resolve_model(model)
        assert self._policy_folder is not None, "rank 0 has resolved the model before"
        self._policy = Policy.load(
            self._policy_folder,
            model,
            lora,
            self._device,
            self.ranks,
            self._open_weights(model),
            offload=self._offload,
        )
        log.info(
            "Loaded a base model.",
            model=model.id,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            rss_mb=round(psutil.Process().memory_info().rss / 1e6),
        )

    def state(self, manifest: Manifest) -> TrainerState | None:
        """The state of this version, if it is the one held."""
        held = self._manifest is not None and self._manifest.files == manifest.files
        return self._state if held else None

    def sealed(self, run_id: str, version: int) -> Manifest | None:
        """The manifest of this version, if its state is held: it may not be published yet."""
        held = self._manifest
        is_it = held is not None and (held.run_id, held.version) == (run_id, version)
        return held if is_it and self._state is not None else None

    def keep(self, manifest: Manifest, state: TrainerState) -> None:
        """Hold the state of a sealed version, in place of any other."""
        self._manifest, self._state = manifest, state
