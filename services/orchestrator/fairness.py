"""How runs of equal priority share the workers of a role: pure.

Each run has a clock that counts the seconds workers have spent on it, and the run whose clock is
furthest behind goes first: start-time fair queueing (Goyal, Vin and Cheng 1996) with the lengths
that jobs turn out to have. So a run with long jobs gets as many seconds as one with short ones.
Nothing is saved up: the clock of a run that has no work follows those that have some, and a new
run starts where they are.
"""

from collections.abc import Collection
from dataclasses import dataclass

NO_LENGTH_S = 1.0
"""Taken for the length of a job of a run that has finished none: only its order of size matters."""


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """What a run has had of a role's workers."""

    run_id: str
    seconds: float | None
    """None for a run that is new or was paused."""
    has_work: bool
    """Whether jobs of it wait or are under way."""


def moved_up(clocks: Collection[RunClock]) -> dict[str, float]:
    """The clocks to set, of runs that share workers: those of new runs and of runs without work."""
    known = [clock.seconds for clock in clocks if clock.seconds is not None]
    working = [c.seconds for c in clocks if c.seconds is not None and c.has_work]
    now = min(working) if working else max(known, default=0.0)
    return {
        clock.run_id: now
        for clock in clocks
        if clock.seconds is None or (clock.seconds < now and not clock.has_work)
    }


def under_way_s(elapsed_s: float | None, length_s: float) -> float:
    """What a job counts before it is over; `elapsed_s` is None for one that waits in the broker."""
    return max(elapsed_s or 0.0, length_s)
