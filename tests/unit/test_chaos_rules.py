"""Which requests go wrong."""

import time
from http import HTTPStatus
from random import Random

from scripts.chaos.relay import Cut, Fault, Refuse, Request
from scripts.chaos.rules import BURST_S, CALM_S, Bursts, FirstOnes

GET, PUT = Request(method="GET", path="/b/k"), Request(method="PUT", path="/b/k")


def test_the_first_ones_that_match_go_wrong() -> None:
    rule = FirstOnes(lambda request: request.method == "GET", Cut(), 2)
    assert rule(PUT) is None
    assert not rule.struck.is_set()
    assert [rule(GET) for _ in range(3)] == [Cut(), Cut(), None]
    assert rule.struck.is_set()


def test_a_burst_refuses_everything_and_a_calm_nothing() -> None:
    now = time.monotonic()
    stormy, calm = Bursts(Random(7), began=now), Bursts(Random(7), began=now - BURST_S - CALM_S / 9)
    refusals: set[Fault | None] = {stormy(GET) for _ in range(50)}
    assert refusals == {
        Refuse(status=HTTPStatus.INTERNAL_SERVER_ERROR),
        Refuse(status=HTTPStatus.SERVICE_UNAVAILABLE),
    }
    assert calm(GET) is None
