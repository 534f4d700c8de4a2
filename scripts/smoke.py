"""Is this installation whole? Submits a small run to a server, and waits until it has learned.

    OFFBEAT_API_KEY=… python -m scripts.smoke --url https://offbeat.example.org

It takes some minutes on two CPU cores and ends with 0 once the run has succeeded with a higher
reward at its end than at its beginning.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from offbeat.client import DEFAULT_URL, OffbeatClient
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus, RunView
from offbeat.errors import OffbeatError, UnavailableError
from offbeat.specs import load_spec

EXAMPLE = Path("examples/chain_sum.toml")
STEPS = 20
TIMEOUT_S = 3600.0
"""Twenty steps on one slow core, with workers that die on the way."""
POLL_S = 2.0


class SmokeError(Exception):
    """The run did not do what it should have."""


def small(spec: RunSpec, steps: int) -> RunSpec:
    """The same run with so many steps, and no evaluations."""
    train = spec.train.model_copy(update={"steps": steps})
    evaluation = spec.eval.model_copy(update={"every_steps": 0})
    return spec.model_copy(update={"name": "smoke", "train": train, "eval": evaluation})


def gain(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean rewards of the first and the last quarter of the steps."""
    quarter = max(1, len(rewards) // 4)
    return fmean(rewards[:quarter]), fmean(rewards[-quarter:])


def wait_for_end(client: OffbeatClient, run_id: str, timeout_s: float) -> RunView:
    """The run in its end, with a line for each step; raises `SmokeError` when that takes longer.

    A server that is away for a while is waited for.
    """
    deadline = time.monotonic() + timeout_s
    step = -1
    while True:
        if time.monotonic() > deadline:
            raise SmokeError(f"{run_id} did not end within {timeout_s:.0f} s")
        try:
            run = client.run(run_id)
        except UnavailableError as error:
            print(f"the server is away: {error.detail}", flush=True)
        else:
            if run.progress.step != step:
                step = run.progress.step
                print(_progress(run), flush=True)
            if run.status.is_final:
                return run
        time.sleep(POLL_S)


def check(client: OffbeatClient, run: RunView) -> str:
    """What to say of a run that learned; raises `SmokeError` for another one."""
    if run.status != RunStatus.SUCCEEDED:
        raise SmokeError(f"{run.id} has {run.status}: `offbeat diagnose {run.id}` says more")
    points = client.metrics(run.id, ["reward"]).series["reward"]
    before, after = gain([point.value for point in points])
    if after <= before:
        raise SmokeError(f"the reward did not rise: {before:.2f} at first, {after:.2f} in the end")
    return f"{run.id} succeeded: the reward rose from {before:.2f} to {after:.2f}"


def _progress(run: RunView) -> str:
    reward = run.progress.reward
    known = "" if reward is None else f", reward {reward:.2f}"
    return f"{run.status}: step {run.progress.step} of {run.progress.steps}{known}"


def main() -> int:
    """Submit, watch, judge."""
    parser = argparse.ArgumentParser(description="Submit a small run and see that it learns.")
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--spec", type=Path, default=EXAMPLE)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    options = parser.parse_args()
    try:
        with OffbeatClient(options.url) as client:
            run = client.submit(small(load_spec(options.spec), options.steps))
            print(f"submitted {run.id}", flush=True)
            print(check(client, wait_for_end(client, run.id, options.timeout_s)))
    except (OffbeatError, SmokeError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
