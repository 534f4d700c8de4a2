"""Offbeat's training step: `services.trainer.run` without its network and its publish."""

import torch

from offbeat.contracts.run_spec import RunSpec
from scripts.bench.contender import (
    WARM_UP_STEPS,
    StepMeasurement,
    StepTask,
    Stopwatch,
    memory_bytes,
    serve,
)
from scripts.bench.recipe import bench_spec
from services.trainer.__main__ import make_deterministic
from services.trainer.batch import StepBatch
from services.trainer.gradient import micro_batches, step_gradient
from services.trainer.initial import seeded_adapter
from services.trainer.optimizer import next_state
from services.trainer.policy import Policy
from services.trainer.rollouts import Group
from services.trainer.state import TrainerState, starting_state


def measure(task: StepTask) -> StepMeasurement:
    """Take the steps one after the other, each from the state that the last one made."""
    make_deterministic()
    spec = bench_spec(task)
    policy = Policy.load(task.model, spec.model, spec.adapter, torch.device("cpu"))
    state = starting_state(seeded_adapter(policy.shapes, spec.train.seed))
    groups = task.groups()
    loaded_bytes = memory_bytes("VmRSS")
    stopwatch = Stopwatch()
    for step in range(WARM_UP_STEPS + task.repeats):
        stopwatch.start()
        state = _step(policy, state, groups, spec, step)
        stopwatch.stop()
    forwarded = micro_batches(StepBatch.of_groups(groups, spec), spec, policy.device)
    return StepMeasurement(
        seconds=stopwatch.seconds,
        cpu_seconds=stopwatch.cpu_seconds,
        loaded_bytes=loaded_bytes,
        peak_bytes=memory_bytes("VmHWM"),
        forwarded_tokens=sum(int((batch.segments_BT >= 0).sum()) for batch in forwarded),
        scored_tokens=sum(len(batch.targets_N) for batch in forwarded),
    )


def _step(
    policy: Policy, state: TrainerState, groups: list[Group], spec: RunSpec, step: int
) -> TrainerState:
    policy.install(state.masters)
    batch = StepBatch.of_groups(groups, spec)
    micro = micro_batches(batch, spec, policy.device)
    gradient, _ = step_gradient(
        policy, micro, batch, spec, version=step + 1, between=lambda _: None
    )
    new_state, _ = next_state(state, gradient, spec.train, step)
    return new_state


if __name__ == "__main__":
    serve(StepTask, measure)
