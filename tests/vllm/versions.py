"""The versions of a run as the trainer computes and encodes them, without the training: the weights
only drift from one to the next."""

from collections.abc import Mapping
from pathlib import Path

import torch

from offbeat.algorithms import packing
from offbeat.contracts.run_spec import LoraSection, ModelSection
from offbeat.contracts.weights import ADAPTER_FILES, Manifest
from offbeat.objects import ObjectStore
from services.generator.engines.base import Completion
from services.trainer import checkpoint
from services.trainer.canary import first_canary, next_canary
from services.trainer.initial import seeded_adapter
from services.trainer.model import Tensors
from services.trainer.policy import Policy
from services.trainer.state import starting_state
from tests.adapters import upload
from tests.specs import spec

MODEL = ModelSection(id="small", dtype="float32")
LORA = LoraSection(rank=4, alpha=8)
PROMPT_IDS = (1, 40, 41, 42, 0, 1, 50)
NUM_VERSIONS = 3
STEP = 0.001
"""How far each weight drifts from one version to the next. It moves log-probabilities by some
thousandths, less than a real step does: only the canary's direction tells such versions apart."""


class Versions:
    """Not thread-safe: there is one policy, which carries one version at a time."""

    def __init__(self, model_folder: Path) -> None:
        self._policy = policy = Policy.load(model_folder, MODEL, LORA, torch.device("cpu"))
        self._masters = drifting(policy.shapes)
        self._canaries = [first_canary(policy, self._masters[0], PROMPT_IDS)]
        for parent, masters in enumerate(self._masters[1:]):
            self._canaries.append(
                next_canary(policy, masters, self._canaries[parent], self._masters[parent])
            )

    def files(self, version: int) -> dict[str, bytes]:
        """The PEFT folder and the trainer's state."""
        return checkpoint.encode(starting_state(self._masters[version]), self._policy, spec())

    def write(self, folder: Path, version: int) -> Path:
        """The PEFT folder on disk."""
        folder.mkdir(parents=True)
        files = self.files(version)
        for name in ADAPTER_FILES:
            (folder / name).write_bytes(files[name])
        return folder

    def upload(self, store: ObjectStore, run_id: str, version: int) -> Manifest:
        """Put the version into the store; the manifest would publish it."""
        canary, files = self._canaries[version], self.files(version)
        manifest = upload(store, run_id, version, files, rank=LORA.rank, canary=canary)
        targets = self._policy.target_modules
        return manifest.model_copy(update={"base_model": MODEL.id, "target_modules": targets})

    def logprobs(
        self, version: int, prompt_ids: tuple[int, ...], completion: Completion, temperature: float
    ) -> list[float]:
        """log pi of each token of the completion, as the loss computes it."""
        self._policy.install(self._masters[version])
        scored = packing.Completion(
            sample=0, ids=completion.ids, behaviour_logprobs=completion.logprobs, advantage=0.0
        )
        row = packing.Row(prompt_ids=prompt_ids, completions=(scored,))
        with torch.no_grad():
            logprobs_N, _ = self._policy.logprobs(packing.PackedBatch.of_rows([row]), temperature)
        return logprobs_N.tolist()


def drifting(shapes: Mapping[str, torch.Size]) -> list[Tensors]:
    """The weights by version; those of version 0 leave the base model as it is."""
    generator = torch.Generator().manual_seed(0)
    weights: list[Tensors] = [seeded_adapter(shapes, seed=0)]
    for _ in range(1, NUM_VERSIONS):
        noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        weights.append({name: weights[-1][name] + STEP * noise[name] for name in shapes})
    return weights
