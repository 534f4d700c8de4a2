"""Which harm strikes when: a plan that depends on nothing but its seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

AFTER_VERSIONS = range(1, 6)
"""A run of the suite has twice as many steps, so there is work left to be harmed."""
DELAY_MAX_S = 1.0
"""A few steps: so a harm strikes anywhere within one."""
ASYNCHRONOUS = 2
"""`staleness.max_versions` of the runs that are not synchronous."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One harm to one run, some time after a version was published."""

    number: int
    harm: str
    max_versions: int
    after_version: int
    delay_s: float
    seed: int
    """For what the harm itself leaves to chance."""


def plan(seed: int, count: int, harms: Sequence[str]) -> list[Moment]:
    """Every harm once, in a random order, then all of them again, and so on; from one turn to the
    next synchronous runs become asynchronous ones and the other way round."""
    random = Random(seed)
    moments: list[Moment] = []
    turn = 0
    while len(moments) < count:
        order = random.sample(sorted(harms), len(harms))
        for harm in order[: count - len(moments)]:
            synchronous = (sorted(harms).index(harm) + turn) % 2 == 0
            moments.append(
                Moment(
                    number=len(moments) + 1,
                    harm=harm,
                    max_versions=0 if synchronous else ASYNCHRONOUS,
                    after_version=random.choice(AFTER_VERSIONS),
                    delay_s=random.uniform(0, DELAY_MAX_S),
                    seed=random.getrandbits(32),
                )
            )
        turn += 1
    return moments
