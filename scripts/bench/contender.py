"""A contender of the step benchmark as a process of its own, so that its peak memory is its own.

python -m scripts.bench.<contender> <task.json> <measurement.json>
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch

from offbeat.contracts.base import Contract
from offbeat.contracts.rollouts import Rollout
from offbeat.tables import decode_rollouts
from scripts.processes import on_ranks

K = TypeVar("K", bound=Contract)

WARM_UP_STEPS = 1
"""The first step of a process touches memory that the later ones use again."""


class StepTask(Contract):
    """What a contender is to do: this many timed steps over these samples."""

    model: Path
    rollouts: Path
    max_new_tokens: int
    trl_batch: int
    repeats: int

    def groups(self) -> list[tuple[Rollout, ...]]:
        """The samples of the step, group by group."""
        samples = decode_rollouts(self.rollouts.read_bytes())
        return [tuple(group) for _, group in groupby(samples, lambda sample: sample.group_id)]


class StepMeasurement(Contract):
    """What a contender did."""

    seconds: tuple[float, ...]
    """Of each step after the warm-up."""
    cpu_seconds: tuple[float, ...]
    """Of all threads in the same steps: on one thread, the time without what others take away."""
    loaded_bytes: int
    """Resident once the model is loaded."""
    peak_bytes: int
    """The most that was ever resident."""
    forwarded_tokens: int
    """Tokens that went through the layers in one step, without padding."""
    scored_tokens: int
    """Positions that went through the head."""


class Stopwatch:
    """Times steps and says so; the warm-up is not kept."""

    def __init__(self) -> None:
        self._began = (0.0, 0.0)
        self._steps: list[tuple[float, float]] = []

    def start(self) -> None:
        """A step begins."""
        self._began = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        """It is over."""
        wall_s, cpu_s = (
            now - began
            for now, began in zip(
                (time.perf_counter(), time.process_time()), self._began, strict=True
            )
        )
        self._steps.append((wall_s, cpu_s))
        print(f"    step {len(self._steps)}: {wall_s:.2f} s, {cpu_s:.2f} s of CPU", flush=True)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of the steps after the warm-up."""
        return tuple(wall_s for wall_s, _ in self._steps[WARM_UP_STEPS:])

    @property
    def cpu_seconds(self) -> tuple[float, ...]:
        """Of the same steps, of all threads."""
        return tuple(cpu_s for _, cpu_s in self._steps[WARM_UP_STEPS:])


def memory_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process. `getrusage` would count the parent's memory before exec
    too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def serve(kind: type[K], measure: Callable[[K], StepMeasurement]) -> None:
    """The `main` of a contender whose tasks are of this kind."""
    task_path, result_path = map(Path, sys.argv[1:])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    measurement = measure(kind.model_validate_json(task_path.read_bytes()))
    if os.environ.get("RANK", "0") == "0":
        result_path.write_text(measurement.model_dump_json())


def run_contender(
    module: str, task: Contract, folder: Path, threads: int, ranks: int = 0
) -> StepMeasurement:
    """Start a contender and wait for it: one process, or ranks of torchrun."""
    task_path, result_path = folder / "task.json", folder / "measurement.json"
    task_path.write_text(task.model_dump_json())
    python = on_ranks(ranks) if ranks else (sys.executable,)
    subprocess.run(
        [*python, "-m", module, str(task_path), str(result_path)],
        check=True,
        env={**os.environ, **thread_limits(threads)},
    )
    return StepMeasurement.model_validate_json(result_path.read_bytes())


def thread_limits(threads: int) -> dict[str, str]:
    """The variables that give a process this many threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
