"""The load benchmark: the pace of its cases, and the figures from what was noted."""

import math
import os
from pathlib import Path

import pytest

from scripts.bench import scale_generator
from scripts.bench.scale_calls import COMPLETE, LEASE, PUBLISH, Ledger, Route
from scripts.bench.scale_cases import ScaleCase, scale_spec
from scripts.bench.scale_figures import (
    case_figures,
    growth,
    growth_table,
    per_step_ms,
    route_figures,
    routes_table,
    sizes_table,
)
from scripts.bench.scale_fleet import Measured, Phase
from scripts.bench.scale_meter import Reading, Sizes, file_sizes, rss_bytes, tree_cpu_s
from scripts.bench.scale_trainer import version_files
from services.generator import models, weights
from services.weight_proxy.adapter import check_shapes, read_shapes

CASE = ScaleCase(generators=100, runs=10, steps=5, step_s=7.2)


def ledger(**calls: list[float]) -> Ledger:
    routes = {"lease": LEASE, "complete": COMPLETE, "publish": PUBLISH}
    noted = Ledger()
    for name, seconds in calls.items():
        noted.seconds[routes[name].name] += seconds
    return noted


def phase(seconds: float, cpu_s: dict[str, float], noted: Ledger, steps: int = 0) -> Phase:
    sizes = Sizes(
        at_s=0.0,
        steps=steps,
        rss_bytes={"orchestrator": 100_000_000, "weight_proxy": 50_000_000},
        database_bytes=2_000_000,
        store_bytes=3_000_000,
        store_objects=7,
    )
    return Phase(
        begin=Reading(at_s=10.0, cpu_s=dict.fromkeys(cpu_s, 1.0)),
        end=Reading(at_s=10.0 + seconds, cpu_s={name: 1.0 + s for name, s in cpu_s.items()}),
        ledger=noted,
        lags_s=[0.001, 0.003],
        sizes=[sizes],
        steps=steps,
    )


def test_a_fleet_that_never_waits_does_the_work_in_the_time_that_is_planned() -> None:
    """50 steps of 8 groups: 400 groups on 100 generators, 4 each, busy for 0.8 of 36 s."""
    assert 4 * CASE.group_s == pytest.approx(0.8 * 36)
    assert (CASE.trainers, CASE.work_s, CASE.pace) == (2, 36.0, 50.0)
    assert 50 / 2 * CASE.train_s == pytest.approx(0.8 * 36)


def test_retention_is_as_much_faster_as_the_work() -> None:
    retention = scale_spec(CASE, 3).retention
    assert retention.rollout_days * 86_400 == pytest.approx(18.0)
    assert scale_spec(CASE, 3).data.seed == 3


def test_a_simulated_generator_follows_runs_as_a_real_one_does() -> None:
    assert scale_generator.RUNS_MAX == models.RUNS_MAX
    assert scale_generator.RUN_IDLE_S == weights.RUN_IDLE_S
    assert scale_generator.POLL_WAIT_S == weights.POLL_WAIT_S


def test_the_weight_proxy_takes_the_tiny_adapter(tmp_path: Path) -> None:
    body = version_files()["adapter_model.safetensors"]
    path = tmp_path / "adapter"
    path.write_bytes(body)
    with path.open("rb") as file:
        shapes = read_shapes(file, len(body))
    check_shapes(shapes, 1, None)
    assert sorted(shapes.values()) == [(1, 64), (64, 1)]


def test_figures_are_per_second_and_per_step() -> None:
    """10 s of work, 5 steps; 0.4 s of CPU in the orchestrator, 0.1 s in Valkey, half of it idle
    cost: 5 s of rest took 0.125 s."""
    noted = ledger(lease=[0.01] * 20, complete=[0.02] * 10, publish=[0.1])
    noted.refused[LEASE.name] = 5
    noted.step_waits_s.extend(n / 1000 for n in range(101))
    work = phase(10.0, {"orchestrator": 0.4, "valkey": 0.1, "simulation": 2.0}, noted, steps=5)
    idle = phase(5.0, {"orchestrator": 0.1, "valkey": 0.025, "simulation": 0.5}, ledger())
    one = case_figures(Measured(case=CASE, idle=idle, work=work))
    assert (one["leases_per_s"], one["completions_per_s"], one["requests_per_s"]) == (1.5, 1.0, 3.1)
    assert one["cpu_ms_per_step"] == pytest.approx(
        {"orchestrator": 80.0, "valkey": 20.0, "simulation": 400.0, "control plane": 100.0}
    )
    assert one["cpu_ms_per_step_above_idle"] == pytest.approx(50.0)
    assert (one["step_waits_p50_ms"], one["step_waits_p99_ms"]) == pytest.approx((50.0, 99.0))
    assert one["cores_busy"]["simulation"] == pytest.approx(0.2)
    assert one["fleet_lag_p99_ms"] == pytest.approx(2.98)
    assert (one["rss_mb"]["orchestrator"], one["store_objects"]) == ([100.0], [7])
    assert routes_table([one]).row_count == 3
    assert growth_table([one, one]).row_count == 12
    assert next(iter(sizes_table([one]).columns[1].cells)) == "100 → 100 → 100"


def test_a_case_without_a_step_has_figures_too() -> None:
    nothing = phase(10.0, {"orchestrator": 0.4}, ledger())
    assert per_step_ms(nothing)["control plane"] == pytest.approx(400.0)


def test_routes_are_listed_with_their_percentiles_most_called_first() -> None:
    noted = ledger(lease=[n / 1000 for n in range(101)], publish=[0.5])
    noted.retried[PUBLISH.name] = 2
    found = route_figures(noted)
    assert list(found) == [LEASE.name, PUBLISH.name]
    assert (found[LEASE.name]["p50_ms"], found[LEASE.name]["p99_ms"]) == pytest.approx((50.0, 99.0))
    assert (found[PUBLISH.name]["calls"], found[PUBLISH.name]["retried"]) == (1, 2)


def test_growth_compares_the_largest_case_with_the_smallest() -> None:
    assert growth([2.0, 4.0, 5.0]) == 2.5
    assert growth([0.0, 4.0]) == math.inf


def test_a_ledger_that_is_taken_begins_anew() -> None:
    noted = ledger(lease=[0.1])
    taken = noted.take()
    assert (taken.calls(LEASE), noted.calls(LEASE)) == (1, 0)
    assert Route(service="orchestrator", method="GET", path="/x").name == "GET /x"


def test_the_meter_reads_this_process(tmp_path: Path) -> None:
    assert tree_cpu_s(os.getpid()) > 0
    assert rss_bytes(os.getpid()) > 10_000_000
    for size in (3, 5):
        (tmp_path / str(size)).write_bytes(b"x" * size)
    assert sorted(file_sizes(tmp_path)) == [3, 5]
