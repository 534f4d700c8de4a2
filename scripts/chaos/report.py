"""What the suite says: a line a moment, a table at the end, and `summary.json`."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.markup import escape
from rich.table import Table

from scripts.chaos.trial import Trial


@dataclass(frozen=True, kw_only=True)
class HarmSummary:
    """All trials of one harm."""

    moments: int
    runs_ended: int
    recovery_p50_s: float | None
    recovery_max_s: float | None
    jobs_redone: int
    violations: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`."""

    seed: int
    moments: int
    runs_ended: int
    violations: int
    byte_equal: int
    byte_compared: int
    """Synchronous runs, each compared with the undisturbed one."""
    wall_s: float
    by_harm: dict[str, HarmSummary]
    found: list[str]
    """Every violation, with the moment that showed it."""


def summarise(seed: int, trials: Sequence[Trial], wall_s: float) -> Summary:
    """The numbers of a suite."""
    compared = [trial.byte_equal for trial in trials if trial.byte_equal is not None]
    return Summary(
        seed=seed,
        moments=len(trials),
        runs_ended=sum(trial.ended for trial in trials),
        violations=sum(len(trial.violations) for trial in trials),
        byte_equal=sum(compared),
        byte_compared=len(compared),
        wall_s=round(wall_s, 1),
        by_harm={
            harm: _of_harm([trial for trial in trials if trial.moment.harm == harm])
            for harm in sorted({trial.moment.harm for trial in trials})
        },
        found=[
            f"moment {trial.moment.number}, {trial.moment.harm}: {violation}"
            for trial in trials
            for violation in trial.violations
        ],
    )


def _of_harm(trials: Sequence[Trial]) -> HarmSummary:
    recoveries = [trial.recovery_s for trial in trials if trial.recovery_s is not None]
    return HarmSummary(
        moments=len(trials),
        runs_ended=sum(trial.ended for trial in trials),
        recovery_p50_s=round(median(recoveries), 2) if recoveries else None,
        recovery_max_s=round(max(recoveries), 2) if recoveries else None,
        jobs_redone=sum(trial.jobs_redone for trial in trials),
        violations=sum(len(trial.violations) for trial in trials),
    )


def line(trial: Trial, total: int) -> str:
    """How one moment went."""
    moment = trial.moment
    mode = "synchronous" if moment.max_versions == 0 else "asynchronous"
    faults = escape("; ".join(trial.violations))
    verdict = f"[red]{faults}[/]" if faults else "[green]ok[/]"
    return (
        f"{moment.number:>3}/{total}  {moment.harm} ({mode}, after version "
        f"{moment.after_version}): next version after {_seconds(trial.recovery_s)}, "
        f"{trial.jobs_redone} jobs redone, {trial.wall_s:.0f} s  {verdict}"
    )


def table(summary: Summary) -> Table:
    """All harms."""
    shown = Table(title=f"Chaos, seed {summary.seed}", title_justify="left")
    shown.add_column("harm")
    for column in ("moments", "runs ended", "recovery p50", "max", "jobs redone", "violations"):
        shown.add_column(column, justify="right")
    for harm, row in summary.by_harm.items():
        shown.add_row(
            harm,
            str(row.moments),
            str(row.runs_ended),
            _seconds(row.recovery_p50_s),
            _seconds(row.recovery_max_s),
            str(row.jobs_redone),
            f"[red]{row.violations}[/]" if row.violations else "0",
        )
    return shown


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
