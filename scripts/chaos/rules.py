"""Rules for a relay: which requests go wrong, in which way, how often."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random

from scripts.chaos.relay import Fault, Refuse, Request

BURST_S = 1.5
CALM_S = 1.5


@dataclass
class FirstOnes:
    """The fault for the first so many requests that match; `struck` is set at the first."""

    matches: Callable[[Request], bool]
    fault: Fault
    left: int = 1
    struck: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Request) -> Fault | None:
        """See `Rule`."""
        if self.left == 0 or not self.matches(request):
            return None
        self.left -= 1
        self.struck.set()
        return self.fault


@dataclass
class Bursts:
    """All requests of a while refused, with 500 or 503; then none for a while; and so on."""

    random: Random
    began: float = field(default_factory=time.monotonic)

    def __call__(self, _: Request) -> Fault | None:
        """See `Rule`."""
        if (time.monotonic() - self.began) % (BURST_S + CALM_S) > BURST_S:
            return None
        statuses = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
        return Refuse(status=self.random.choice(statuses))
