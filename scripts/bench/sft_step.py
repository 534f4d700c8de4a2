"""Offbeat's supervised step, on one process or on the ranks that torchrun started."""

from pathlib import Path

import torch

from scripts.bench.contender import WARM_UP_STEPS, StepMeasurement, Stopwatch, memory_bytes, serve
from scripts.bench.sft_task import SftTask
from services.trainer.__main__ import make_deterministic
from services.trainer.initial import seeded_adapter
from services.trainer.memory import Memory
from services.trainer.optimizer import next_state
from services.trainer.ranks import Ranks
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from services.trainer.state import starting_state

RANK_TIMEOUT_S = 600.0


def measure(task: SftTask) -> StepMeasurement:
    """Take the steps one after the other; a rank other than the first follows, and says what it
    held."""
    make_deterministic()
    device = torch.device("cpu")
    memory = Memory(lambda model: Path(model.id), device, Ranks.join(device, None, RANK_TIMEOUT_S))
    stopwatch = Stopwatch()
    loaded_bytes = 0
    if memory.ranks.rank:
        memory.follow()
    else:
        loaded_bytes = _lead(task, memory, stopwatch)
        memory.ranks.leave()
    measured = task.measured(stopwatch, loaded_bytes)
    peak_gb = measured.peak_bytes / 1e9
    print(f"    rank {memory.ranks.rank}: {peak_gb:.2f} GB at its peak", flush=True)
    return measured


def _lead(task: SftTask, memory: Memory, stopwatch: Stopwatch) -> int:
    """Rank 0's steps; what it held before them."""
    spec = task.spec()
    policy = memory.policy(spec)
    state = starting_state(seeded_adapter(policy.shapes, spec.train.seed))
    loaded_bytes, examples = memory_bytes("VmRSS"), task.examples()
    for step in range(WARM_UP_STEPS + task.repeats):
        stopwatch.start()
        policy.install(state.masters)
        batches = example_batches(examples, spec.train, policy.device)
        gradient, _ = sft_gradient(
            policy, batches, spec.train, version=step + 1, between=lambda _: None
        )
        state, _ = next_state(state, gradient, spec.train, step)
        stopwatch.stop()
    return loaded_bytes


if __name__ == "__main__":
    serve(SftTask, measure)
