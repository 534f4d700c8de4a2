"""S3 as it fails in practice: down, slow, in bursts of errors, half-way, and after the write."""

import time
from collections.abc import Callable
from random import Random

from scripts.chaos.fleet import S3, Fleet
from scripts.chaos.harm import OUTAGE_S, Harm, Strike
from scripts.chaos.relay import Cut, LoseReply, Rule, Slow, harmless
from scripts.chaos.rules import Bursts, FirstOnes

ANSWER_S = 0.5
"""What a request takes at least while S3 is slow."""
TIMES = 3
"""Transfers that go wrong in a row."""
TRANSFERS_S = 5.0
"""Within which a run that goes on makes as many."""


def outage(seconds: float) -> Strike:
    """S3 refuses connections for so long."""

    def strike(fleet: Fleet, _: Random) -> float:
        struck_at = time.time()
        fleet.relays[S3].close()
        time.sleep(seconds)
        fleet.relays[S3].open()
        return struck_at

    return strike


def behaves(make_rule: Callable[[Random], Rule], seconds: float) -> Strike:
    """S3 behaves by a rule for so long."""

    def strike(fleet: Fleet, random: Random) -> float:
        struck_at = time.time()
        fleet.relays[S3].rule = make_rule(random)
        time.sleep(seconds)
        fleet.relays[S3].rule = harmless
        return struck_at

    return strike


def _slow(_: Random) -> Rule:
    return lambda _: Slow(seconds=ANSWER_S)


def _cut(_: Random) -> Rule:
    return FirstOnes(lambda request: request.method == "GET", Cut(), TIMES)


def _lose_replies(_: Random) -> Rule:
    return FirstOnes(lambda request: request.method == "PUT", LoseReply(), TIMES)


STORE_HARMS = (
    Harm(name=f"s3 down for {OUTAGE_S:.0f} s", strike=outage(OUTAGE_S)),
    Harm(name="s3 slow", strike=behaves(_slow, OUTAGE_S)),
    Harm(name="s3 answers 500 and 503 in bursts", strike=behaves(Bursts, OUTAGE_S)),
    Harm(name="s3 downloads cut half-way", strike=behaves(_cut, TRANSFERS_S)),
    Harm(name="s3 replies lost after the write", strike=behaves(_lose_replies, TRANSFERS_S)),
)
