"""Offbeat's run: all its services as `make up` starts them, watched over REST."""

import sys
import time

from offbeat.client import OffbeatClient
from offbeat.contracts.run_spec import RunSpec
from scripts.bench.learning_run import LearningPoint, LearningRun
from scripts.stack import Stack, StackOptions, running_stack

POLL_S = 0.5


def learn(spec: RunSpec, options: StackOptions) -> LearningRun:
    """Start the services, run until the goal or the last step, stop the services."""
    launched_at = time.time()
    with (
        running_stack(options, sys.stdout) as stack,
        OffbeatClient(stack.addresses.orchestrator) as client,
    ):
        run_id = client.submit(spec).id
        return _watched(client, stack, run_id, launched_at)


def _watched(client: OffbeatClient, stack: Stack, run_id: str, launched_at: float) -> LearningRun:
    shown = 0
    while True:
        stack.watch()
        ended = client.run(run_id).status.is_final
        run = _run_so_far(client, run_id, launched_at)
        for number, point in enumerate(run.points[shown:], start=shown + 1):
            seconds = point.at - launched_at
            print(f"    step {number}: {seconds:.1f} s, reward {point.reward:.2f}", flush=True)
        shown = len(run.points)
        if ended or run.wall_s(with_start_up=True) is not None:
            return run
        time.sleep(POLL_S)


def _run_so_far(client: OffbeatClient, run_id: str, launched_at: float) -> LearningRun:
    """A step is done when its version is published."""
    # First, so that the event of each is there.
    rewards = client.metrics(run_id, ["reward"]).series.get("reward", ())
    published = {
        int(str(event.data["version"])): event.at.timestamp()
        for event in client.iter_events(run_id)
        if event.kind == "version_published"
    }
    return LearningRun(
        launched_at=launched_at,
        began_at=published.get(0, launched_at),
        points=tuple(
            LearningPoint(at=published[point.step], reward=point.value) for point in rewards
        ),
    )
