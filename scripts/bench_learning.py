"""`make bench-learning`: the time in which the demo's task is learned, against TRL's `GRPOTrainer`.

    python -m scripts.bench_learning [--data-dir .offbeat] [--seeds 3] [--steps-max 60]

One seed after the other and one contender after the other, on all cores. Offbeat runs with all its
services, one generator and one trainer; TRL runs as one process. Both take the same prompts in the
same order with the same recipe, and stop once the mean reward of five steps reaches the goal.
`<data-dir>/bench/learning.json` is written after every seed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from offbeat.contracts.run_spec import RunSpec
from offbeat.models import resolve_model
from offbeat.specs import load_spec
from scripts.bench.cases import CASES
from scripts.bench.contender import thread_limits
from scripts.bench.learning_run import (
    GOAL_WINDOW,
    REWARD_GOAL,
    LearningRun,
    LearningTask,
    learning_spec,
)
from scripts.bench.machine import machine
from scripts.bench.offbeat_learning import learn
from scripts.demo import EXAMPLE
from scripts.stack import StackOptions, interrupt_on_signals


def run_trl(spec: RunSpec, model: Path, folder: Path) -> LearningRun:
    """TRL in a process of its own."""
    task_path, run_path = folder / "trl-task.json", folder / "trl-run.json"
    task = LearningTask(
        spec=spec, model=str(model), launched_at=time.time(), trl_batch=CASES[0].trl_batch
    )
    task_path.write_text(task.model_dump_json())
    subprocess.run(
        [sys.executable, "-m", "scripts.bench.trl_learning", str(task_path), str(run_path)],
        check=True,
        env={**os.environ, **thread_limits(os.cpu_count() or 1), "PYTHONHASHSEED": "0"},
    )
    return LearningRun.model_validate_json(run_path.read_bytes())


def seed_figures(seed: int, offbeat: LearningRun, trl: LearningRun) -> dict[str, object]:
    """Both runs of a seed; a time is None where the goal was not reached."""
    figures: dict[str, object] = {"seed": seed}
    for name, with_start_up in (("", True), ("_without_start_up", False)):
        offbeat_s = offbeat.wall_s(with_start_up=with_start_up)
        trl_s = trl.wall_s(with_start_up=with_start_up)
        figures[f"offbeat_wall{name}_s"], figures[f"trl_wall{name}_s"] = offbeat_s, trl_s
        figures[f"wall_ratio{name}"] = trl_s / offbeat_s if trl_s and offbeat_s else None
    for name, run in (("offbeat", offbeat), ("trl", trl)):
        curve = run.curve(with_start_up=True)
        figures[f"{name}_curve"] = [(one.time_s, one.reward) for one in curve]
    return figures


def summary(seeds: Sequence[dict[str, object]]) -> dict[str, object]:
    """The report over all seeds; medians are over those in which both reached the goal."""
    report: dict[str, object] = {"reward_goal": REWARD_GOAL, "goal_window_steps": GOAL_WINDOW}
    for name in ("wall_ratio", "wall_ratio_without_start_up"):
        ratios = [ratio for one in seeds if isinstance(ratio := one[name], float)]
        report[name] = median(ratios) if ratios else None
    return {**report, "seeds": list(seeds)}


def main() -> int:
    """Measure seed by seed."""
    parser = argparse.ArgumentParser(description="Compare the time to a reward with TRL's.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps-max", type=int, default=60)
    arguments = parser.parse_args()
    interrupt_on_signals()
    example = load_spec(EXAMPLE)
    bench: Path = arguments.data_dir / "bench"
    models = arguments.data_dir / "models"
    model = resolve_model(example.model, models, None)
    before, seeds = machine(), list[dict[str, object]]()
    for seed in range(1, arguments.seeds + 1):
        spec = learning_spec(example, seed, arguments.steps_max)
        folder = bench / f"seed-{seed}-{int(time.time())}"
        folder.mkdir(parents=True)
        print(f"  offbeat, seed {seed}", flush=True)
        (folder / "models").symlink_to(models.resolve())
        offbeat = learn(spec, StackOptions(data_dir=folder.resolve()))
        print(f"  trl, seed {seed}", flush=True)
        seeds.append(seed_figures(seed, offbeat, run_trl(spec, model, folder)))
        report = {**before, **summary(seeds)}
        (bench / "learning.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"  seed {seed}: ratio {seeds[-1]['wall_ratio']}")
    print(f"Figures: {bench}/learning.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
