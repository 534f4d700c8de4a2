"""`make bench-trainer`: one training step against that of TRL's `GRPOTrainer`, on the same samples.

    python -m scripts.bench_trainer [--data-dir .offbeat] [--threads N] [--only WORKLOAD]

Contenders run one after the other, each in a process of its own with the same number of threads.
Generation, rewards and saving are outside of both steps. The figures are printed, and written to
`<data-dir>/bench/trainer.json` after every workload.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from offbeat.contracts.run_spec import LoraSection
from offbeat.models import resolve_model
from offbeat.specs import load_spec
from offbeat.tables import encode_rollouts
from scripts.bench.cases import CASES, Case, samples_of
from scripts.bench.contender import StepMeasurement, StepTask, run_contender, thread_limits
from scripts.bench.figures import StepFigures, step_figures
from scripts.bench.machine import machine
from scripts.bench.matmul import Layers, step_flops
from scripts.bench.tables import figure_table
from scripts.demo import EXAMPLE

SEED = 0
GIGABYTE = 1e9


def run_case(
    case: Case, model: Path, folder: Path, threads: int
) -> tuple[StepFigures, dict[str, StepMeasurement]]:
    """Measure both contenders on one workload."""
    folder.mkdir(parents=True, exist_ok=True)
    rollouts = folder / "rollouts.parquet"
    rollouts.write_bytes(encode_rollouts(samples_of(case, SEED), ["bench"]))
    task = StepTask(
        model=model,
        rollouts=rollouts,
        max_new_tokens=case.new_tokens,
        trl_batch=case.trl_batch,
        repeats=case.repeats,
    )
    measured: dict[str, StepMeasurement] = {}
    for name in ("offbeat", "trl"):
        print(f"  {name}, {case.name}", flush=True)
        measured[name] = run_contender(f"scripts.bench.{name}_step", task, folder, threads)
    offbeat = measured["offbeat"]
    flops = step_flops(
        Layers.of_llama(model),
        rank=LoraSection().rank,
        forwarded_tokens=offbeat.forwarded_tokens,
        scored_tokens=offbeat.scored_tokens,
    )
    figures = step_figures(
        case.name,
        offbeat,
        measured["trl"],
        offbeat_flops=flops,
        flops_per_s=matmul_rate(model, threads),
    )
    return figures, measured


def matmul_rate(model: Path, threads: int) -> float:
    """The machine's rate right now, in FLOP/s."""
    measured = subprocess.run(
        [sys.executable, "-m", "scripts.bench.matmul", str(model)],
        check=True,
        env={**os.environ, **thread_limits(threads)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(measured.stdout)


def table_of(figures: Sequence[StepFigures]) -> Table:
    """The figures for a person."""
    table = figure_table(
        "A training step: Offbeat against TRL",
        ("step s", "ratio", "CPU ratio", "tokens/s", "peak GB", "ratio", "matmul"),
    )
    for one in figures:
        peaks = one.offbeat_peak_bytes / GIGABYTE, one.trl_peak_bytes / GIGABYTE
        table.add_row(
            one.case,
            f"{one.offbeat_step_s:.1f} / {one.trl_step_s:.1f}",
            f"{one.step_ratio:.1f}×",
            f"{one.cpu_ratio:.1f}×",
            f"{one.offbeat_tokens_per_s:.0f} / {one.trl_tokens_per_s:.0f}",
            f"{peaks[0]:.1f} / {peaks[1]:.1f}",
            f"{one.peak_memory_ratio:.2f}×",
            f"{one.matmul_share:.0%}",
        )
    return table


def main() -> None:
    """Measure every workload and report after each."""
    parser = argparse.ArgumentParser(description="Compare the training step with TRL's.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", choices=[case.name for case in CASES], help="one workload, and not all four"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.data_dir / "bench"
    model = resolve_model(load_spec(EXAMPLE).model, arguments.data_dir / "models", None)
    report: dict[str, object] = {**machine(), "threads": arguments.threads}
    figures: list[StepFigures] = []
    steps: dict[str, object] = {}
    for case in (one for one in CASES if arguments.only in (None, one.name)):
        one, measured = run_case(case, model, folder / case.name, arguments.threads)
        figures.append(one)
        steps[case.name] = {name: each.model_dump() for name, each in measured.items()}
        report |= {"cases": [asdict(each) for each in figures], "measurements": steps}
        (folder / "trainer.json").write_text(json.dumps(report, indent=2) + "\n")
        Console().print(table_of(figures))
    print(f"Figures: {folder}/trainer.json")


if __name__ == "__main__":
    main()
