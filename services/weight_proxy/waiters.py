"""Long-polls for the next version of a run.

A publish in this process wakes its waiters at once; one query for all of them, twice a second,
finds what other replicas published. Who does not want to wait is told what the table says.
"""

import asyncio
from dataclasses import dataclass

import structlog
from anyio import to_thread
from prometheus_client import Gauge

from offbeat.contracts.weights import PublishedVersion
from offbeat.errors import UnavailableError
from services.weight_proxy.registry import Registry

log = structlog.get_logger(__name__)

WAITERS_MAX = 4096
"""A few thousand generators, one socket each; a fleet beyond that needs another replica."""
POLL_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Waiter:
    """One reader that waits for a version of `run_id` above `after`."""

    run_id: str
    after: int
    arrival: asyncio.Future[PublishedVersion]


class Waiters:
    """All long-polls of this process. Belongs to one event loop."""

    def __init__(self, registry: Registry, gauge: Gauge, waiters_max: int = WAITERS_MAX) -> None:
        self._registry = registry
        self._waiters_max = waiters_max
        self._waiting: set[Waiter] = set()
        gauge.set_function(lambda: len(self._waiting))

    async def wait(self, run_id: str, after: int, wait_s: float) -> PublishedVersion | None:
        """A version above `after` as soon as there is one, or None when `wait_s` has passed."""
        if len(self._waiting) >= self._waiters_max:
            raise UnavailableError(
                f"{self._waiters_max} readers wait already: try again, or add a replica"
            )
        arrival = asyncio.get_running_loop().create_future()
        waiter = Waiter(run_id=run_id, after=after, arrival=arrival)
        # It waits before it looks, so that no publish can fall between the two.
        self._waiting.add(waiter)
        try:
            latest = self._registry.remembered_newest(run_id) if wait_s else None
            if latest is None:
                latest = await to_thread.run_sync(self._registry.latest, run_id)
            if latest is not None and latest.manifest.version > after:
                return latest
            return await asyncio.wait_for(arrival, wait_s)
        except TimeoutError:
            return None
        finally:
            self._waiting.discard(waiter)

    def announce(self, published: PublishedVersion) -> None:
        """Wake everybody who waits for this version. Call it on the event loop."""
        manifest = published.manifest
        for waiter in self._waiting:
            awaited = waiter.run_id == manifest.run_id and waiter.after < manifest.version
            if awaited and not waiter.arrival.done():
                waiter.arrival.set_result(published)

    async def watch(self) -> None:
        """Announce for ever what other replicas publish."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self._poll()
            except UnavailableError as error:
                log.warning("Could not look for new versions.", error=error.detail)

    async def _poll(self) -> None:
        run_ids = {waiter.run_id for waiter in self._waiting}
        if not run_ids:
            return
        newest = await to_thread.run_sync(self._registry.newest, run_ids)
        behind = {
            waiter.run_id
            for waiter in self._waiting
            if waiter.after < newest.get(waiter.run_id, waiter.after)
        }
        for run_id in behind:
            published = await to_thread.run_sync(self._registry.latest, run_id)
            if published is not None:  # Else its run was deleted a moment ago.
                self.announce(published)
