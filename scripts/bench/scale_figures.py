"""Figures of the load benchmark: pure functions over what was noted."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from rich.table import Table

from scripts.bench.scale_calls import COMPLETE, LEASE, LONG_POLLS, Ledger
from scripts.bench.scale_fleet import Measured, Phase
from scripts.bench.sync_figures import MEGABYTE, MILLISECOND, Percentiles
from scripts.bench.tables import figure_table

CONTROL_PLANE = ("orchestrator", "weight_proxy", "valkey", "database")
"""What a step's cost is counted over; SQLite is part of the orchestrator."""


class RouteFigures(TypedDict):
    """One route in one case."""

    calls: int
    refused: int
    retried: int
    p50_ms: float
    p99_ms: float


class CaseFigures(TypedDict):
    """What `scale.json` says of a case."""

    case: str
    generators: int
    runs: int
    trainers: int
    pace: float
    finished: bool
    steps: int
    seconds: float
    steps_per_s: float
    leases_per_s: float
    completions_per_s: float
    requests_per_s: float
    step_waits_p50_ms: float
    """For answers of the services, where nothing hides it: the lease, whether the version and its
    parent are there, the heartbeat that lets the next step begin."""
    step_waits_p99_ms: float
    cpu_ms_per_step: dict[str, float]
    """Of each process, idle costs included, and of the control plane as a whole."""
    cpu_ms_per_step_above_idle: float
    """Without what the same fleet costs in the same time when it has nothing to do."""
    cpu_ms_per_s_idle: dict[str, float]
    cores_busy: dict[str, float]
    fleet_lag_p99_ms: float
    """How late the simulation itself was: its times cannot be more exact."""
    rss_mb: dict[str, list[float]]
    """Of the services, as the work went on."""
    database_mb: list[float]
    store_mb: list[float]
    store_objects: list[int]
    sizes_at_steps: list[int]
    routes: dict[str, RouteFigures]


def case_figures(measured: Measured) -> CaseFigures:
    """The figures of a case."""
    case, idle, work = measured.case, measured.idle, measured.work
    idle_ms_s = {name: 1e3 * share for name, share in cores_busy(idle).items()}
    busy = cores_busy(work)
    per_step = per_step_ms(work)
    idle_ms = sum(idle_ms_s.get(name, 0.0) for name in CONTROL_PLANE) * work.seconds
    waits = Percentiles.of(work.ledger.step_waits_s or [0.0])
    calls = {name: len(seconds) for name, seconds in work.ledger.seconds.items()}
    return CaseFigures(
        case=case.name,
        generators=case.generators,
        runs=case.runs,
        trainers=case.trainers,
        pace=case.pace,
        finished=work.finished,
        steps=work.steps,
        seconds=work.seconds,
        steps_per_s=work.steps / work.seconds,
        leases_per_s=taken(work.ledger, LEASE.name) / work.seconds,
        completions_per_s=taken(work.ledger, COMPLETE.name) / work.seconds,
        requests_per_s=sum(calls.values()) / work.seconds,
        step_waits_p50_ms=waits.p50_s / MILLISECOND,
        step_waits_p99_ms=waits.p99_s / MILLISECOND,
        cpu_ms_per_step=per_step,
        cpu_ms_per_step_above_idle=per_step["control plane"] - idle_ms / max(1, work.steps),
        cpu_ms_per_s_idle=idle_ms_s,
        cores_busy=busy,
        fleet_lag_p99_ms=Percentiles.of(work.lags_s).p99_s / MILLISECOND,
        rss_mb={
            name: [sizes.rss_bytes[name] / MEGABYTE for sizes in work.sizes]
            for name in ("orchestrator", "weight_proxy")
        },
        database_mb=[sizes.database_bytes / MEGABYTE for sizes in work.sizes],
        store_mb=[sizes.store_bytes / MEGABYTE for sizes in work.sizes],
        store_objects=[sizes.store_objects for sizes in work.sizes],
        sizes_at_steps=[sizes.steps for sizes in work.sizes],
        routes=route_figures(work.ledger),
    )


def taken(ledger: Ledger, route: str) -> int:
    """Calls of the route that were not refused."""
    return len(ledger.seconds.get(route, ())) - ledger.refused[route]


def cores_busy(phase: Phase) -> dict[str, float]:
    """CPU seconds of each process in a second."""
    return {
        name: (cpu_s - phase.begin.cpu_s[name]) / phase.seconds
        for name, cpu_s in phase.end.cpu_s.items()
    }


def per_step_ms(work: Phase) -> dict[str, float]:
    """CPU milliseconds of each process for each step, and of the control plane."""
    per_step = {
        name: share * work.seconds / max(1, work.steps) / MILLISECOND
        for name, share in cores_busy(work).items()
    }
    return per_step | {"control plane": sum(per_step.get(name, 0.0) for name in CONTROL_PLANE)}


def route_figures(ledger: Ledger) -> dict[str, RouteFigures]:
    """How often each route was called and how long that took, the most called one first."""
    found: dict[str, RouteFigures] = {}
    for name, seconds in sorted(ledger.seconds.items(), key=lambda item: -len(item[1])):
        of_route = Percentiles.of(seconds)
        found[name] = RouteFigures(
            calls=len(seconds),
            refused=ledger.refused[name],
            retried=ledger.retried[name],
            p50_ms=of_route.p50_s / MILLISECOND,
            p99_ms=of_route.p99_s / MILLISECOND,
        )
    return found


def growth(values: Sequence[float]) -> float:
    """How many times the last one is the first one."""
    return values[-1] / values[0] if values[0] else float("inf")


ROWS: Mapping[str, str] = {
    "steps/s": "steps_per_s",
    "leases/s": "leases_per_s",
    "completions/s": "completions_per_s",
    "requests/s": "requests_per_s",
    "ms that a step waits, p50": "step_waits_p50_ms",
    "ms that a step waits, p99": "step_waits_p99_ms",
    "CPU ms a step, above idle": "cpu_ms_per_step_above_idle",
    "simulation late, p99 ms": "fleet_lag_p99_ms",
}


def _table(title: str, cases: Sequence[CaseFigures]) -> Table:
    """A column for each case."""
    return figure_table(title, (case["case"] for case in cases))


def growth_table(cases: Sequence[CaseFigures]) -> Table:
    """The figures side by side, a case a column."""
    table = _table("How it grows with the fleet", cases)
    table.add_column("growth", justify="right")
    for row, values in _rows(cases).items():
        table.add_row(row, *(f"{value:,.1f}" for value in values), f"{growth(values):.1f}×")
    return table


def _rows(cases: Sequence[CaseFigures]) -> dict[str, list[float]]:
    rows = {row: [float(str(case[name])) for case in cases] for row, name in ROWS.items()}
    for name in (*CONTROL_PLANE, "control plane"):
        if any(name in case["cpu_ms_per_step"] for case in cases):
            rows[f"CPU ms a step, {name}"] = [
                case["cpu_ms_per_step"].get(name, 0.0) for case in cases
            ]
    rows["CPU ms a second, idle fleet"] = [
        sum(case["cpu_ms_per_s_idle"].get(name, 0.0) for name in CONTROL_PLANE) for case in cases
    ]
    return rows


def sizes_table(cases: Sequence[CaseFigures]) -> Table:
    """What was held before the work, half-way and in the end, a case a column."""
    table = _table("What is held: before, half-way, in the end", cases)
    rows: dict[str, list[Sequence[float]]] = {
        "MB of memory, orchestrator": [case["rss_mb"]["orchestrator"] for case in cases],
        "MB of memory, weight_proxy": [case["rss_mb"]["weight_proxy"] for case in cases],
        "MB of database": [case["database_mb"] for case in cases],
        "objects in the store": [case["store_objects"] for case in cases],
    }
    for row, series in rows.items():
        cells = [(values[0], values[len(values) // 2], values[-1]) for values in series]
        table.add_row(row, *(" → ".join(f"{value:,.0f}" for value in cell) for cell in cells))
    return table


def routes_table(cases: Sequence[CaseFigures]) -> Table:
    """p50 and p99 of each route, a case a column."""
    table = _table("Routes: calls, p50 / p99 in ms", cases)
    polls = {route.name for route in LONG_POLLS}
    for name in dict.fromkeys(name for case in cases for name in case["routes"]):
        cells = [case["routes"].get(name) for case in cases]
        table.add_row(name, *(_cell(cell, timed=name not in polls) for cell in cells))
    return table


def _cell(route: RouteFigures | None, *, timed: bool) -> str:
    if route is None:
        return ""
    times = f": {route['p50_ms']:.1f} / {route['p99_ms']:.1f}" if timed else ""
    return f"{route['calls']:,}{times}"
