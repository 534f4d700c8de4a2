"""The HTTP routes as simulated workers call them, and how long each call took.

A call is repeated, as a real worker repeats it, while the service cannot be reached or is not able
to answer; the time then counts from the first try.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

from offbeat.contracts.base import Contract
from scripts.bench.scale_http import Answer, Connections

RETRY_PAUSE_S = 0.5
REFUSALS = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.GONE, HTTPStatus.LOCKED)
"""Answers that a worker goes on from: there is none, too late, given up, wait."""

Service = Literal["orchestrator", "weight_proxy"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route of a service."""

    service: Service
    method: str
    path: str

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.method} {self.path}"


LEASE = Route(service="orchestrator", method="POST", path="/internal/jobs/{job}/lease")
HEARTBEAT = Route(service="orchestrator", method="POST", path="/internal/jobs/{job}/heartbeat")
COMPLETE = Route(service="orchestrator", method="POST", path="/internal/jobs/{job}/complete")
REPORT = Route(service="orchestrator", method="PUT", path="/internal/workers/{worker}")
SUBMIT = Route(service="orchestrator", method="POST", path="/v1/runs")
RUN = Route(service="orchestrator", method="GET", path="/v1/runs/{run}")
DIAGNOSIS = Route(service="orchestrator", method="GET", path="/v1/runs/{run}/diagnosis")
PUBLISH = Route(service="weight_proxy", method="PUT", path="/v1/runs/{run}/weights/{version}")
VERSION = Route(service="weight_proxy", method="GET", path="/v1/runs/{run}/weights/{version}")
NEWER = Route(service="weight_proxy", method="GET", path="/v1/runs/{run}/weights/latest")
FILE = Route(
    service="weight_proxy", method="GET", path="/v1/runs/{run}/weights/{version}/files/{name}"
)
LONG_POLLS = (NEWER,)
"""Their time is mostly the wait that was asked for, so it says nothing."""


@dataclass(frozen=True)
class Ledger:
    """What was called, by the name of the route."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    step_waits_s: list[float] = field(default_factory=list[float])
    """How long each training step waited for answers; what runs beside a step is not in it."""
    complaints: dict[str, str] = field(default_factory=dict[str, str])
    """The newest reason for which a call was tried again."""

    def calls(self, route: Route) -> int:
        """Calls that were answered so far."""
        return len(self.seconds[route.name])

    def take(self) -> "Ledger":
        """What was called so far; it begins anew."""
        taken = Ledger(
            dict(self.seconds), Counter(self.refused), Counter(self.retried), [*self.step_waits_s]
        )
        for part in (self.seconds, self.refused, self.retried, self.step_waits_s):
            part.clear()
        return taken


class Caller:
    """The connections of one worker."""

    def __init__(self, urls: Mapping[Service, str], ledger: Ledger) -> None:
        self._services = {service: Connections(url) for service, url in urls.items()}
        self._ledger = ledger

    def close(self) -> None:
        """Close them."""
        for connections in self._services.values():
            connections.close()

    async def call(
        self,
        route: Route,
        body: Contract | None = None,
        query: str = "",
        **names: str | int,
    ) -> Answer:
        """The answer; one of `REFUSALS` is an answer too."""
        target = route.path.format(**names) + query
        content = None if body is None else body.model_dump_json().encode()
        began = time.monotonic()
        while True:
            answer = await self._try(route, target, content)
            if answer is not None:
                break
            self._ledger.retried[route.name] += 1
            await asyncio.sleep(RETRY_PAUSE_S)
        self._ledger.seconds[route.name].append(time.monotonic() - began)
        if answer.status in REFUSALS:
            self._ledger.refused[route.name] += 1
        else:
            assert answer.status < HTTPStatus.BAD_REQUEST, f"{route.name}: {answer}"
        return answer

    async def _try(self, route: Route, target: str, content: bytes | None) -> Answer | None:
        """None where the service cannot be reached, or is not able to answer."""
        try:
            answer = await self._services[route.service].request(route.method, target, content)
        except (OSError, EOFError) as error:
            self._ledger.complaints[route.name] = repr(error)
            return None
        if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return answer
        self._ledger.complaints[route.name] = answer.content.decode()
        return None
