"""Calls to the orchestrator and the weight-proxy that break in the middle, with the service or
without it."""

import time
from collections.abc import Callable
from random import Random

from scripts.chaos.fleet import ORCHESTRATOR, WEIGHT_PROXIES, Fleet
from scripts.chaos.harm import Harm, Strike
from scripts.chaos.relay import LoseReply, LoseRequest, Request
from scripts.chaos.rules import FirstOnes

CALL_WAIT_S = 10.0
"""Within which a run that goes on makes another such call."""


def _is_completion(request: Request) -> bool:
    return request.path.endswith("/complete")


def _is_publish(request: Request) -> bool:
    return request.method == "PUT" and "/weights/" in request.path


def broken_call(service: str, matches: Callable[[Request], bool], *victims: str) -> Strike:
    """Break the next such call, before or after the service has seen it, and kill the victims."""

    def strike(fleet: Fleet, random: Random) -> float:
        rule = FirstOnes(matches, random.choice((LoseRequest(), LoseReply())))
        fleet.relays[service].rule = rule
        rule.struck.wait(CALL_WAIT_S)
        for victim in victims:
            fleet.kill(victim)
        return time.time()

    return strike


PROXY, OTHER_PROXY = WEIGHT_PROXIES
CALL_HARMS = (
    Harm(name="completion broken", strike=broken_call(ORCHESTRATOR, _is_completion)),
    Harm(
        name="orchestrator killed during a completion",
        strike=broken_call(ORCHESTRATOR, _is_completion, ORCHESTRATOR),
    ),
    Harm(name="publish broken", strike=broken_call(PROXY, _is_publish)),
    Harm(
        name="one weight-proxy of two killed during a publish",
        strike=broken_call(PROXY, _is_publish, PROXY),
    ),
    Harm(
        name="both weight-proxies killed during a publish",
        strike=broken_call(PROXY, _is_publish, PROXY, OTHER_PROXY),
    ),
)
