"""`make bench-generator`: tokens/s of Offbeat's engine for CPUs against transformers' own.

    python -m scripts.bench_generator [--data-dir .offbeat] [--threads N] [--quick]

All contenders hold the same model in this process and take turns, so that a busy moment of the
machine meets all of them. The figures are printed, and written to `<data-dir>/bench/generator.json`
after every workload.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from offbeat.models import resolve_model
from offbeat.specs import load_spec
from scripts.bench.generator_cases import (
    CASES,
    QUICK_CASES,
    GeneratorCase,
    prompts_of_demo,
    requests_of,
)
from scripts.bench.generator_contenders import ADAPTER, Contenders
from scripts.bench.generator_figures import Call, case_figures, table_of
from scripts.bench.generator_shares import logprob_difference, step_shares
from scripts.bench.machine import machine
from scripts.demo import EXAMPLE

ROUNDS = 3
WARM_UP_TOKENS = 2
CHECKED = GeneratorCase(sequences=8, new_tokens=24, adapter=True)
"""The workload whose log-probabilities are checked, and whose steps are looked into."""
SHARES = GeneratorCase(sequences=64, new_tokens=24, adapter=True)

Prompts = list[tuple[int, ...]]


def run_case(
    case: GeneratorCase, contenders: Contenders, prompts: Prompts, rounds: int
) -> dict[str, list[Call]]:
    """Let every contender have its turn in every round."""
    requests = requests_of(case, prompts)
    taking_turns = contenders.by_name(adapter=case.adapter)
    for generate in taking_turns.values():
        generate(requests, WARM_UP_TOKENS)
    calls: dict[str, list[Call]] = {name: [] for name in taking_turns}
    for _ in range(rounds):
        for name, generate in taking_turns.items():
            began = time.perf_counter()
            completions = generate(requests, case.new_tokens)
            seconds = time.perf_counter() - began
            calls[name].append(Call(tokens=sum(map(len, completions)), seconds=seconds))
    return calls


def differences(source: Path, prompts: Prompts) -> dict[str, float]:
    """The largest difference of a log-probability from a plain forward's, by type."""
    requests = requests_of(CHECKED, prompts)
    found: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        with TemporaryDirectory() as folder:
            contenders = Contenders.load(source, Path(folder), dtype)
            completions = contenders.completions(requests, CHECKED.new_tokens, ADAPTER)
            found[str(dtype).removeprefix("torch.")] = logprob_difference(
                contenders.peft, requests, completions
            )
            contenders.engine.close()
    return found


def measure(
    cases: Sequence[GeneratorCase], source: Path, rounds: int, report: dict[str, object], path: Path
) -> None:
    """Every workload, then where the time of a step goes."""
    prompts, console = prompts_of_demo(source), Console()
    with TemporaryDirectory() as folder:
        contenders = Contenders.load(source, Path(folder), torch.bfloat16)
        calls: list[dict[str, list[Call]]] = []
        for case in cases:
            print(f"  {case.name}", flush=True)
            calls.append(run_case(case, contenders, prompts, rounds))
            figures = [case_figures(*pair) for pair in zip(cases, calls, strict=False)]
            report["cases"] = figures
            path.write_text(json.dumps(report, indent=2) + "\n")
            console.print(table_of(cases, calls))
        looked_into = SHARES if SHARES in cases else CHECKED
        shares = step_shares(contenders, requests_of(looked_into, prompts), looked_into.new_tokens)
        contenders.engine.close()
    report |= {"step_shares_of": looked_into.name, "step_shares": shares}
    for part, share in shares.items():
        print(f"  {share:4.0%} {part}")
    report["logprob_max_abs_difference"] = found = differences(source, prompts)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"Largest difference of a log-probability from a plain forward's: {found}")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description="Compare generation with transformers' own.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="short workloads, one round")
    arguments = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    path: Path = arguments.data_dir / "bench" / "generator.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    source = resolve_model(load_spec(EXAMPLE).model, arguments.data_dir / "models", None)
    cases, rounds = (QUICK_CASES, 1) if arguments.quick else (CASES, arguments.rounds)
    report: dict[str, object] = {**machine(), "threads": arguments.threads, "rounds": rounds}
    measure(cases, source, rounds, report, path)
    print(f"Figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
