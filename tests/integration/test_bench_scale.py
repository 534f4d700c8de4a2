"""The load benchmark's smallest case, through real services."""

from pathlib import Path

import pytest

from scripts.bench.scale_calls import COMPLETE, FILE, LEASE, PUBLISH, SUBMIT
from scripts.bench.scale_cases import ScaleCase
from scripts.bench_scale import run_case

pytestmark = pytest.mark.system


def test_a_simulated_fleet_takes_runs_to_their_end(tmp_path: Path) -> None:
    """2 runs of 2 steps of 8 groups. They share 3 generators, so that each has one: a job is all
    groups of a step."""
    case = ScaleCase(generators=3, runs=2, steps=2, step_s=0.5)
    one = run_case(case, "sqlite", tmp_path, idle_s=0.2)
    calls = {name: route["calls"] - route["refused"] for name, route in one["routes"].items()}
    assert (one["finished"], one["steps"]) == (True, 4)
    assert (calls[SUBMIT.name], calls[PUBLISH.name]) == (2, 6)
    # Prepare, init, 2 steps and the groups of each.
    assert calls[LEASE.name] == calls[COMPLETE.name] == 2 * (2 + 2 + 2)
    # Who follows a run pulls the weights of each version, and the configuration once.
    assert calls[FILE.name] > calls[PUBLISH.name]
    assert one["cpu_ms_per_step"]["control plane"] > 0
    assert one["store_objects"][-1] > 12
    assert one["database_mb"][-1] > 0
