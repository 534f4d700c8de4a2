"""Offbeat's supervised step, on one process or on the ranks that torchrun started."""

from collections.abc import Callable
from pathlib import Path

import torch

from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from scripts.bench.contender import WARM_UP_STEPS, StepMeasurement, Stopwatch, memory_bytes, serve
from scripts.bench.sft_task import SftTask
from services.trainer.__main__ import make_deterministic
from services.trainer.initial import seeded_adapter
from services.trainer.memory import Memory
from services.trainer.optimizer import learning_rate, next_state
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
    memory = Memory(
        lambda model: Path(model.id),
        device,
        Ranks.join(device, None, RANK_TIMEOUT_S),
        store=S3ObjectStore.connect(ObjectStoreSettings()),  # nothing is saved
        offload=task.offload,
    )
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
    take = _full_step(task, memory) if task.is_full else _adapter_step(task, memory)
    loaded_bytes = memory_bytes("VmRSS")
    for step in range(WARM_UP_STEPS + task.repeats):
        stopwatch.start()
        take(step)
        stopwatch.stop()
    return loaded_bytes


def _adapter_step(task: SftTask, memory: Memory) -> Callable[[int], None]:
    train = task.spec().train
    policy = memory.policy(task.spec())
    state = starting_state(seeded_adapter(policy.shapes, train.seed))

    def take(step: int) -> None:
        nonlocal state
        policy.install(state.masters)
        batches = example_batches(task.examples(), train, policy.device)
        gradient, _ = sft_gradient(policy, batches, train, version=step + 1, between=_ignore)
        state, _ = next_state(state, gradient, train, step)

    return take


def _full_step(task: SftTask, memory: Memory) -> Callable[[int], None]:
    train = task.spec().train
    model = memory.full_model(task.spec())

    def take(step: int) -> None:
        batches = example_batches(task.examples(), train, model.device, is_full=True)
        sft_gradient(model, batches, train, version=step + 1, between=_ignore)
        model.update(learning_rate(train, step), train.weight_decay, train.max_grad_norm)

    return take


def _ignore(_: float) -> None:
    """Nobody waits for progress."""


if __name__ == "__main__":
    serve(SftTask, measure)
