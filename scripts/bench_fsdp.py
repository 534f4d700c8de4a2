"""`make bench-fsdp`: a supervised step of one process, of ranks that share a model, and of
TRL's `SFTTrainer`.

    python -m scripts.bench_fsdp [--data-dir .offbeat] [--threads N] [--repeats 5] [--only NAME]

Contenders run one after the other on the same cores, which the ranks of one divide among them. The
figures are printed, and written to `<data-dir>/bench/fsdp.json` after every one.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from offbeat.models import resolve_model
from offbeat.specs import load_spec
from scripts.bench.contender import StepMeasurement, run_contender
from scripts.bench.machine import machine
from scripts.bench.sft_task import SftTask
from scripts.bench.tables import figure_table
from scripts.demo import EXAMPLE

GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A program, and how many ranks of torchrun run it; none for a process of its own."""

    name: str
    module: str
    ranks: int
    is_full: bool = False
    offload: bool = False


OURS, TRL = "scripts.bench.sft_step", "scripts.bench.trl_sft_step"
CONTENDERS = (
    Contender(name="offbeat, one process", module=OURS, ranks=0),
    Contender(name="offbeat, 1 rank", module=OURS, ranks=1),
    Contender(name="offbeat, FSDP2 on 1 rank", module=OURS, ranks=1, offload=True),
    Contender(name="offbeat, FSDP2 on 2 ranks", module=OURS, ranks=2),
    Contender(name="TRL, one process", module=TRL, ranks=0),
    Contender(name="TRL, DDP on 2 ranks", module=TRL, ranks=2),
    Contender(name="offbeat, all weights", module=OURS, ranks=0, is_full=True),
    Contender(name="offbeat, all weights, 2 ranks", module=OURS, ranks=2, is_full=True),
    Contender(name="TRL, all weights", module=TRL, ranks=0, is_full=True),
)


def table_of(measured: Mapping[str, StepMeasurement]) -> Table:
    """The figures for a person."""
    columns = ("step s", "tokens/s", "loaded GB", "peak GB of rank 0")
    table = figure_table("A supervised step", columns)
    for name, one in measured.items():
        step_s = median(one.seconds)
        table.add_row(
            name,
            f"{step_s:.2f}",
            f"{one.forwarded_tokens / step_s:.0f}",
            f"{one.loaded_bytes / GIGABYTE:.2f}",
            f"{one.peak_bytes / GIGABYTE:.2f}",
        )
    return table


def main() -> None:
    """Measure every contender and report after each."""
    parser = argparse.ArgumentParser(description="Compare a step of one process and of ranks.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="contenders whose name begins so")
    arguments = parser.parse_args()
    folder: Path = arguments.data_dir / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_model(load_spec(EXAMPLE).model, arguments.data_dir / "models", None)
    about = {**machine(), "threads": arguments.threads}
    measured: dict[str, StepMeasurement] = {}
    for one in CONTENDERS:
        if not one.name.startswith(arguments.only):
            continue
        print(f"  {one.name}", flush=True)
        threads = max(1, arguments.threads // max(1, one.ranks))
        task = SftTask(
            model=model, repeats=arguments.repeats, is_full=one.is_full, offload=one.offload
        )
        measured[one.name] = run_contender(one.module, task, folder, threads, one.ranks)
        steps = {name: each.model_dump() for name, each in measured.items()}
        report = json.dumps({**about, "contenders": steps}, indent=2)
        (folder / "fsdp.json").write_text(report + "\n")
    Console().print(table_of(measured))
    print(f"Figures: {folder}/fsdp.json")


if __name__ == "__main__":
    main()
