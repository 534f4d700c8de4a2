from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import Console

from offbeat.cli.watch import Snapshot, frame, plain_line
from offbeat.contracts.runs import RunStatus
from tests import run_views

NOW = run_views.CREATED_AT + timedelta(seconds=400)


def shown(snapshot: Snapshot) -> list[str]:
    console = Console(width=80, highlight=False, color_system=None)
    events = [run_views.event(1, "The run was created.", kind="run_created")]
    with console.capture() as capture:
        console.print(frame(snapshot, events, NOW))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_live_view_has_the_state_the_trend_and_the_last_events() -> None:
    run = run_views.run(step=20)
    at = run_views.event(1, "").at.astimezone()
    snapshot = Snapshot(run=run, values={1: 0.0, 2: 0.5, 3: 1.0}, events=())
    assert shown(snapshot) == [
        "run-00000000a1  chain-sum  running",
        "━" * 20 + " " * 20 + "  6m38s",
        "step 20/40  reward 0.50  version 20  staleness 1.0  182 tok/s  eta 3m10s",
        "▁▅█  6 groups generating, 2 ready",
        "",
        f"{at:%H:%M:%S}  info     run_created         The run was created.",
    ]
    assert shown(replace(snapshot, waiting=True))[1].endswith("  6m38s  waiting for the service")


@pytest.mark.parametrize(
    ("run", "last", "line"),
    [
        (run_views.run(status=RunStatus.QUEUED, step=0), None, "queued  step 0/40"),
        (run_views.run(step=0), None, "step 0/40  version 0"),
        (run_views.run(step=0), run_views.run(step=0), None),
        (
            run_views.run(step=0),
            run_views.run(status=RunStatus.QUEUED, step=0),
            "step 0/40  version 0",
        ),
        (
            run_views.run(step=1),
            run_views.run(step=0),
            "step 1/40  reward 0.03  version 1  staleness 1.0  182 tok/s",
        ),
        (
            run_views.run(step=1, status=RunStatus.PAUSED),
            run_views.run(step=1),
            "paused  step 1/40  reward 0.03  version 1  staleness 1.0  182 tok/s",
        ),
        (run_views.run(step=1, status=RunStatus.CANCELLED), run_views.run(step=1), None),
    ],
)
def test_a_plain_line_is_printed_for_a_step_and_for_a_pause(
    run: run_views.RunView, last: run_views.RunView | None, line: str | None
) -> None:
    found = plain_line(run, last)
    assert (found.plain if found else None) == line
