"""A harm: what is done to the fleet, and what must be so around the run it is done to."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from random import Random

from scripts.chaos.fleet import Fleet

OUTAGE_S = 15.0
"""How long something is down, slow or full."""

Strike = Callable[[Fleet, Random], float]
"""Does the harm and undoes it, unless it undoes itself; when it was done, as `time.time` has it."""


@contextmanager
def as_it_is(_: Fleet) -> Iterator[None]:
    """No other surroundings than usual."""
    yield


@dataclass(frozen=True, kw_only=True)
class Harm:
    """One way to do harm."""

    name: str
    strike: Strike
    around: Callable[[Fleet], AbstractContextManager[None]] = as_it_is
    """Holds from before the run until after it."""
    poisoned: bool = False
    """The run's own spec does the harm: groups are lost, so it has no undisturbed twin."""
