"""`make bench-scale`: what the services do under a fleet of a thousand generators and fifty runs.

    python -m scripts.bench_scale [--data-dir .offbeat] [--generators 10,100,1000] [--runs 50]
        [--steps 10] [--database sqlite|postgres] [--quick]

Orchestrator, weight-proxy, Valkey, S3 server and database are real processes; generators and
trainers are simulated in this one. They take real messages and call the real routes, and wait where
real ones compute. An hour of work is done in minutes, see `scripts/bench/scale_cases.py`. The
figures are printed, and written to `<data-dir>/bench/scale.json` after every case.
"""

import argparse
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import psycopg
from rich.console import Console

from offbeat.objects import S3ObjectStore
from scripts.bench.machine import machine
from scripts.bench.scale_calls import Service
from scripts.bench.scale_cases import ScaleCase
from scripts.bench.scale_figures import (
    CaseFigures,
    case_figures,
    growth_table,
    routes_table,
    sizes_table,
)
from scripts.bench.scale_fleet import measure
from scripts.bench.scale_meter import Meter
from scripts.stack import StackOptions, running_stack
from tests.postgres import running_postgres

SERVICES = ("orchestrator", "weight_proxy", "valkey", "s3")
GARBAGE_INTERVAL_S = 600.0
"""The default between two collections, in the hour that is simulated."""

DatabaseKind = Literal["sqlite", "postgres"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured unless the options say otherwise."""

    generators: str
    runs: int
    steps: int
    step_s: float
    idle_s: float
    """How long the fleet is watched before it gets work."""


FULL = Size(generators="10,100,1000", runs=50, steps=10, step_s=12.0, idle_s=10.0)
QUICK = Size(generators="10,50", runs=5, steps=4, step_s=2.0, idle_s=3.0)


@dataclass(frozen=True, kw_only=True)
class Databases:
    """Where the services keep their tables."""

    settings: Mapping[str, str]
    pids: Mapping[str, int]
    """Of a server of its own, where there is one."""
    size_bytes: Callable[[], int]
    """Of the orchestrator's, which is the larger one."""


@contextmanager
def databases(kind: DatabaseKind, folder: Path) -> Iterator[Databases]:
    """Empty ones for one case."""
    if kind == "sqlite":
        yield Databases(
            settings={},
            pids={},
            size_bytes=lambda: sum(
                file.stat().st_size for file in folder.glob("orchestrator.db*") if file.is_file()
            ),
        )
        return
    with running_postgres() as server, server.connect() as connection:
        ours, proxys = server.create_database(), server.create_database()
        lock_file = connection.execute("SELECT pg_read_file('postmaster.pid')").fetchone()
        assert lock_file is not None
        yield Databases(
            settings={
                "OFFBEAT_ORCHESTRATOR_DATABASE_URL": server.url(ours),
                "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": server.url(proxys),
            },
            pids={"database": int(lock_file[0].split()[0])},
            size_bytes=lambda: _database_bytes(connection, ours),
        )


def _database_bytes(connection: psycopg.Connection, name: str) -> int:
    row = connection.execute("SELECT pg_database_size(%s)", (name,)).fetchone()
    assert row is not None
    return row[0]


def run_case(case: ScaleCase, kind: DatabaseKind, folder: Path, idle_s: float) -> CaseFigures:
    """Start the services on an empty folder, have the fleet work, and take everything down."""
    with databases(kind, folder) as tables:
        garbage_s = GARBAGE_INTERVAL_S / case.pace
        options = StackOptions(
            data_dir=folder,
            generators=0,
            trainers=0,
            settings={**tables.settings, "OFFBEAT_GC_INTERVAL_S": f"{garbage_s:g}"},
        )
        with running_stack(options, sys.stdout) as stack:
            pids = {name: stack.process(name).pid for name in SERVICES}
            meter = Meter(
                pids={**pids, **tables.pids},
                database_bytes=tables.size_bytes,
                objects=folder / "s3",
            )
            urls: dict[Service, str] = {
                "orchestrator": stack.addresses.orchestrator,
                "weight_proxy": stack.addresses.weight_proxy,
            }
            store = S3ObjectStore.connect(stack.object_store)
            measured = measure(case, urls, stack.addresses.redis, store, meter, idle_s)
    return case_figures(measured)


def main() -> int:
    """Measure every size of the fleet and report after each."""
    parser = argparse.ArgumentParser(description="Load the services with simulated workers.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--generators", help="sizes of the fleet, as 10,100,1000")
    parser.add_argument("--runs", type=int)
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--quick", action="store_true", help="two small fleets, under a minute")
    arguments = parser.parse_args()
    _stop_as_ctrl_c_does()
    _allow_connections()
    size = QUICK if arguments.quick else FULL
    cases = [
        ScaleCase(
            generators=int(generators),
            runs=arguments.runs or size.runs,
            steps=arguments.steps or size.steps,
            step_s=size.step_s,
        )
        for generators in (arguments.generators or size.generators).split(",")
    ]
    bench: Path = arguments.data_dir / "bench"
    bench.mkdir(parents=True, exist_ok=True)
    report = {**machine(), "database": arguments.database}
    figures: list[CaseFigures] = []
    for case in cases:
        print(f"  {case.name}", flush=True)
        with TemporaryDirectory(dir=bench, prefix="scale-") as folder:
            path = Path(folder).resolve()
            figures.append(run_case(case, arguments.database, path, size.idle_s))
        (bench / "scale.json").write_text(json.dumps({**report, "cases": figures}, indent=2) + "\n")
    Console().print(routes_table(figures))
    Console().print(growth_table(figures))
    Console().print(sizes_table(figures))
    print(f"Figures: {bench}/scale.json")
    return 0


def _stop_as_ctrl_c_does() -> None:
    """Ctrl-C cancels the event loop in order; an exception out of a handler would hit any task."""
    # A shell has what it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def _allow_connections() -> None:
    """A thousand workers have more sockets than a process may usually have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    sys.exit(main())
