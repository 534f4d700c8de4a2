"""The workload of the ranks benchmark: examples of ragged length, the last two thirds targets."""

import random
from pathlib import Path

from offbeat.algorithms.example_packing import Example
from offbeat.contracts.base import Contract
from offbeat.contracts.data_sources import InlineData
from offbeat.contracts.run_spec import LoraSection, ModelSection, RunSpec, SftSection, TrainSection
from scripts.bench.cases import TOKEN_IDS
from scripts.bench.contender import StepMeasurement, Stopwatch, memory_bytes

EXAMPLES = 16
LENGTHS = (96, 288)
PROMPT_SHARE = 1 / 3
LEARNING_RATE = 1e-4
TRL_BATCH = 2
"""`per_device_train_batch_size`: about as many padded tokens at once as Offbeat forwards."""


class SftTask(Contract):
    """What a contender is to do: this many timed steps over the same examples."""

    model: Path
    repeats: int
    is_full: bool = False
    """All weights are trained, of float32 masters, and no adapter."""
    offload: bool = False
    """FSDP2 is used on one rank too."""

    def spec(self) -> RunSpec:
        """The run whose step is measured."""
        return RunSpec(
            kind="sft",
            model=ModelSection(id=str(self.model)),
            lora=None if self.is_full else LoraSection(),
            data=InlineData(source="inline", rows=({"prompt": "unused", "completion": "unused"},)),
            sft=SftSection(batch_size=EXAMPLES),
            train=TrainSection(steps=self.repeats + 1, learning_rate=LEARNING_RATE),
        )

    def examples(self) -> list[Example]:
        """Random tokens: no contender's time depends on them."""
        draw = random.Random("ranks")
        return [_example(draw, draw.randint(*LENGTHS)) for _ in range(EXAMPLES)]

    def measured(self, stopwatch: Stopwatch, loaded_bytes: int) -> StepMeasurement:
        """What this process did."""
        examples = self.examples()
        return StepMeasurement(
            seconds=stopwatch.seconds,
            cpu_seconds=stopwatch.cpu_seconds,
            loaded_bytes=loaded_bytes,
            peak_bytes=memory_bytes("VmHWM"),
            forwarded_tokens=sum(len(example.ids) for example in examples),
            scored_tokens=sum(sum(example.is_target) for example in examples),
        )


def _example(draw: random.Random, length: int) -> Example:
    prompt = round(length * PROMPT_SHARE)
    return Example(
        ids=tuple(draw.choice(TOKEN_IDS) for _ in range(length)),
        is_target=(False,) * prompt + (True,) * (length - prompt),
    )
