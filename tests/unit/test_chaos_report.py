"""The numbers and lines that the chaos suite gives."""

from dataclasses import asdict
from typing import Any

from scripts.chaos.moments import Moment
from scripts.chaos.report import HarmSummary, line, summarise
from scripts.chaos.trial import Trial


def trial(number: int, harm: str, **changes: Any) -> Trial:
    moment = Moment(
        number=number, harm=harm, max_versions=0, after_version=2, delay_s=0.5, seed=number
    )
    fields: dict[str, Any] = {
        "ended": True,
        "recovery_s": 1.0,
        "jobs_redone": 0,
        "violations": (),
        "byte_equal": True,
        "wall_s": 4.0,
    }
    return Trial(moment=moment, **{**fields, **changes})


TRIALS = [
    trial(1, "frost", recovery_s=2.0, jobs_redone=1),
    trial(2, "fire", recovery_s=None, byte_equal=None),
    trial(3, "frost", recovery_s=5.0, jobs_redone=2),
    trial(4, "frost", ended=False, byte_equal=False, violations=("it melted", "it burnt")),
]


def test_the_summary_counts_by_harm() -> None:
    summary = summarise(7, TRIALS, 60.04)
    assert (summary.moments, summary.runs_ended, summary.wall_s) == (4, 3, 60.0)
    assert (summary.byte_equal, summary.byte_compared) == (2, 3)
    assert summary.violations == 2
    assert summary.found == ["moment 4, frost: it melted", "moment 4, frost: it burnt"]
    assert summary.by_harm["frost"] == HarmSummary(
        moments=3,
        runs_ended=2,
        recovery_p50_s=2.0,
        recovery_max_s=5.0,
        jobs_redone=3,
        violations=2,
    )
    assert summary.by_harm["fire"].recovery_p50_s is None


def test_the_summary_is_json() -> None:
    body = asdict(summarise(7, TRIALS[:1], 1.0))
    assert body == {
        "seed": 7,
        "moments": 1,
        "runs_ended": 1,
        "violations": 0,
        "byte_equal": 1,
        "byte_compared": 1,
        "wall_s": 1.0,
        "by_harm": {
            "frost": {
                "moments": 1,
                "runs_ended": 1,
                "recovery_p50_s": 2.0,
                "recovery_max_s": 2.0,
                "jobs_redone": 1,
                "violations": 0,
            }
        },
        "found": [],
    }


def test_a_line_says_how_a_moment_went() -> None:
    assert line(TRIALS[0], 60) == (
        "  1/60  frost (synchronous, after version 2): next version after 2.0 s, 1 jobs redone, "
        "4 s  [green]ok[/]"
    )
    assert line(TRIALS[3], 60).endswith("[red]it melted; it burnt[/]")
