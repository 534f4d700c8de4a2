"""The plots of docs/benchmarks.md, from the figures that the benchmarks wrote.

python -m scripts.bench.plots [--data-dir .offbeat] [--out docs]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from scripts.bench.learning_run import REWARD_GOAL

SIZE_INCHES = (6.4, 3.2)
COLOURS = {"offbeat": "#1f6feb", "trl": "#8b949e"}
BAR_WIDTH = 0.38


def step_plot(cases: list[dict[str, Any]]) -> Figure:
    """Seconds a step, by workload."""
    figure = Figure(SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for place, (name, colour) in enumerate(COLOURS.items()):
        bars = axes.bar(
            [number + place * BAR_WIDTH for number in range(len(cases))],
            [case[f"{name}_step_s"] for case in cases],
            BAR_WIDTH,
            label=name,
            color=colour,
        )
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(
        [number + BAR_WIDTH / 2 for number in range(len(cases))], [case["case"] for case in cases]
    )
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    return figure


def learning_plot(seeds: list[dict[str, Any]]) -> Figure:
    """Reward by wall time, one line a seed and contender."""
    figure = Figure(SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for number, seed in enumerate(seeds):
        for name, colour in COLOURS.items():
            times, rewards = zip(*seed[f"{name}_curve"], strict=True)
            axes.plot(times, rewards, color=colour, label=None if number else name)
    axes.axhline(REWARD_GOAL, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("seconds since the launch")
    axes.set_ylabel("mean reward of a step")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Draw what has been measured."""
    parser = argparse.ArgumentParser(description="Draw the benchmarks' figures.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    # The same figures give the same bytes.
    mpl.rcParams["svg.hashsalt"] = "offbeat"
    arguments.out.mkdir(exist_ok=True)
    for report, key, draw in (
        ("trainer", "cases", step_plot),
        ("learning", "seeds", learning_plot),
    ):
        figures = json.loads((arguments.data_dir / "bench" / f"{report}.json").read_text())
        draw(figures[key]).savefig(arguments.out / f"bench-{report}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
