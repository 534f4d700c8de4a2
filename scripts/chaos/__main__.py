"""`make chaos`: harm a running stack at seeded moments and check that runs only lose time by it.

    python -m scripts.chaos [--seed 7] [--moments 70] [--harm "trainer killed"]

Every moment has a run of its own on one long-lived stack. The same seed gives the same moments. A
moment after which a run does not end costs the stack, and the next one gets a new one.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from redis import RedisError
from rich.console import Console
from rich.markup import escape

from offbeat.errors import OffbeatError
from scripts.chaos.fleet import IMPATIENT, running_fleet
from scripts.chaos.harms import HARMS
from scripts.chaos.moments import Moment, plan
from scripts.chaos.report import line, summarise, table
from scripts.chaos.trial import Trial, failed_trial, try_moment, undisturbed
from scripts.processes import StackError, interrupt_on_signals
from scripts.stack import StackOptions
from tests.tiny_model import write_tiny_model

GENERATORS = 2
MOMENTS = 2 * len(HARMS)
"""Each harm to a synchronous and to an asynchronous run."""


def run_suite(moments: Sequence[Moment], folder: Path) -> Generator[Trial, None, None]:
    """Try every moment, on as many stacks as it takes."""
    model = write_tiny_model(folder / "tiny-model")
    left = list(moments)
    while left:
        options = StackOptions(
            data_dir=folder / f"stack-{left[0].number:03d}",
            generators=GENERATORS,
            settings=IMPATIENT,
        )
        with running_fleet(options, sys.stdout) as fleet:
            expected = undisturbed(fleet, model)
            while left:
                moment = left.pop(0)
                try:
                    trial = try_moment(fleet, model, moment, HARMS[moment.harm], expected)
                except (StackError, OffbeatError, RedisError, TimeoutError) as error:
                    trial = failed_trial(moment, str(error))
                yield trial
                if not trial.ended:
                    break


def main() -> int:
    """Run the suite and show the table; 1 where an invariant was violated.

    The summary is written after every moment, so it is there when the suite is stopped.
    """
    parser = argparse.ArgumentParser(description="Harm a stack; check that runs only lose time.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--moments", type=int, default=MOMENTS)
    parser.add_argument("--harm", choices=sorted(HARMS), action="append", help="only this one")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    arguments = parser.parse_args()
    folder = arguments.data_dir / "chaos"
    # What an earlier suite left there would be taken up again.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console = Console()
    interrupt_on_signals()
    moments = plan(arguments.seed, arguments.moments, arguments.harm or tuple(HARMS))
    path = folder / "summary.json"
    began = time.monotonic()
    trials: list[Trial] = []
    summary = summarise(arguments.seed, trials, 0.0)
    try:
        with closing(run_suite(moments, folder)) as running:
            for trial in running:
                trials.append(trial)
                console.print(line(trial, len(moments)), soft_wrap=True)
                summary = summarise(arguments.seed, trials, time.monotonic() - began)
                path.write_text(json.dumps(asdict(summary), indent=2) + "\n")
    except StackError as error:
        console.print(f"[red]The suite could not go on:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    console.print(table(summary))
    console.print(
        f"{summary.moments} moments, {summary.runs_ended} runs ended, "
        f"{summary.violations} violations, {summary.byte_equal} of {summary.byte_compared} "
        f"synchronous runs byte-equal to the undisturbed one. Summary: {path}"
    )
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
