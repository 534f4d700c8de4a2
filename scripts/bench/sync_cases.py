"""The cases of the weight-sync benchmark: how large an adapter, and how many generators want it."""

from dataclasses import dataclass
from typing import Literal

from offbeat.contracts.data_sources import InlineData
from offbeat.contracts.run_spec import (
    LoraSection,
    ModelSection,
    PythonReward,
    RunSpec,
    TrainSection,
)

EngineKind = Literal["transformers", "light"]

ADAPTERS = {
    "1 MB": LoraSection(rank=9, alpha=18, target_modules=("q_proj", "v_proj")),
    "5 MB": LoraSection(rank=8, alpha=16),
    "50 MB": LoraSection(rank=82, alpha=164),
}
"""Adapters on SmolLM2-135M that take about so many bytes in bfloat16; PEFT's usual targets."""


@dataclass(frozen=True, kw_only=True)
class SyncCase:
    """One size of adapter for so many generators."""

    size: str
    generators: int

    @property
    def name(self) -> str:
        """As reports and folders call it."""
        return f"{self.size} x {self.generators}"

    @property
    def engine(self) -> EngineKind:
        """One generator computes on the CPU; several could only fight over its cores."""
        return "transformers" if self.generators == 1 else "light"


CASES = tuple(SyncCase(size=size, generators=count) for size in ADAPTERS for count in (1, 4, 16))
QUICK_CASES = (SyncCase(size="5 MB", generators=1), SyncCase(size="5 MB", generators=16))


def sync_spec(model: str, lora: LoraSection, versions: int) -> RunSpec:
    """The run that publishes these versions; nothing of it is trained."""
    return RunSpec(
        model=ModelSection(id=model),
        lora=lora,
        data=InlineData(source="inline", rows=({"prompt": "unused"},)),
        rewards=(PythonReward(type="python", path="unused:unused"),),
        train=TrainSection(steps=versions, learning_rate=1e-4),
    )
