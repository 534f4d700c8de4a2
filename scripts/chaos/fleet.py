"""A stack that can be harmed: every service is reached through a relay, and what ends starts again.

    generators, trainer ──▶ relay ──▶ orchestrator, two weight-proxies, S3

Whatever process ends is started again at once, as systemd or Kubernetes would do.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TextIO

import redis

from offbeat.client import OffbeatClient
from offbeat.objects import S3ObjectStore
from scripts import parts
from scripts.chaos.relay import Relay, harmless
from scripts.processes import StackError, answers, locked
from scripts.stack import Stack, StackOptions, on_own_ports, server

POLL_S = 0.1
SETTLE_TIMEOUT_S = 90.0
"""Within which all parts are back after a harm: a worker imports torch for ten seconds."""
POOL = "default"
GENERATORS = ("generator-1", "generator-2")
TRAINER = "trainer-1"
WORKERS = (*GENERATORS, TRAINER)
ORCHESTRATOR = "orchestrator"
WEIGHT_PROXIES = ("weight_proxy", "weight_proxy-2")
VALKEY, S3 = "valkey", "s3"
PARTS = (VALKEY, S3, ORCHESTRATOR, *WEIGHT_PROXIES, *WORKERS)
IMPATIENT = {
    "OFFBEAT_LEASE_S": "5",
    "OFFBEAT_HEARTBEAT_INTERVAL_S": "1",
    "OFFBEAT_MESSAGE_LOST_S": "4",
}
"""A killed worker and a lost message are missed soon, so that a suite is not mostly waiting."""


class Fleet:
    """Processes, relays and clients of one stack. `running_fleet` makes it."""

    def __init__(self, stack: Stack, relays: Mapping[str, Relay], second_weight_proxy: str) -> None:
        self.stack = stack
        self.relays = relays
        self._health_urls = {
            ORCHESTRATOR: stack.addresses.orchestrator,
            WEIGHT_PROXIES[0]: stack.addresses.weight_proxy,
            WEIGHT_PROXIES[1]: second_weight_proxy,
        }
        self.objects = S3ObjectStore.connect(stack.object_store)
        self.broker = redis.Redis.from_url(stack.addresses.redis, socket_timeout=30)
        self.client = OffbeatClient(stack.addresses.orchestrator)
        self._ending = threading.Event()
        self._changes: dict[str, Mapping[str, str]] = {}
        self._lock = threading.RLock()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self, output: TextIO) -> None:
        """Start everything; raises `StackError` where a part does not come up."""
        self.stack.start(output)
        self.stack.add(self._second_weight_proxy(self._health_urls[WEIGHT_PROXIES[1]]))
        self._keeper.start()

    def close(self) -> None:
        """Stop everything."""
        self._ending.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for name in PARTS:
            with suppress(StopIteration):
                self.signal(name, signal.SIGCONT)
        self.client.close()
        self.broker.close()
        self.stack.stop()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process of a part."""
        with self._lock:
            self.stack.process(name).send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until the process is gone."""
        process = self.stack.process(name)
        process.kill()
        process.wait()

    def pid(self, name: str) -> int:
        """The process of a part as it is now."""
        with self._lock:
            return self.stack.process(name).pid

    @contextmanager
    def started_with(self, name: str, **changes: str) -> Iterator[None]:
        """Have a part run with these variables within the block."""
        self._changes[name] = changes
        self._replace(name)
        try:
            yield
        finally:
            del self._changes[name]
            self._replace(name)

    def heal(self) -> None:
        """Let all relays relay."""
        for relay in self.relays.values():
            relay.rule = harmless

    def settle(self) -> None:
        """Return when every part is there and answers; `StackError` when that takes too long."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while missing := self._missing():
            if time.monotonic() > deadline:
                raise StackError(f"not back after {SETTLE_TIMEOUT_S:.0f} s: {', '.join(missing)}")
            time.sleep(POLL_S)

    def _missing(self) -> list[str]:
        with self._lock:
            ended = [name for name in PARTS if self.stack.process(name).poll() is not None]
        if ended:
            return ended
        urls = self._health_urls.items()
        silent = [name for name, url in urls if not answers(f"{url}/readyz")]
        return silent or [name for name in WORKERS if not self._reports(name)]

    def _reports(self, worker_id: str) -> bool:
        """Whether the process of now, not one before it, has reported to the orchestrator."""
        pid = self.pid(worker_id)
        return any(
            worker.id == worker_id and worker.status == "alive" and worker.report.pid == pid
            for worker in self.client.workers()
        )

    def _keep(self) -> None:
        while not self._ending.wait(POLL_S):
            for name in PARTS:
                with self._lock:
                    if self.stack.process(name).poll() is not None and not self._ending.is_set():
                        self.stack.restart(name, **self._changes.get(name, {}))

    def _replace(self, name: str) -> None:
        with self._lock:
            self.kill(name)
            self.stack.restart(name, **self._changes.get(name, {}))

    def _second_weight_proxy(self, url: str) -> parts.Part:
        folder, port = self.stack.options.data_dir, url.rpartition(":")[2]
        environment = {
            **self.stack.environment(),
            "OFFBEAT_WEIGHT_PROXY_PORT": port,
            "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / f"{WEIGHT_PROXIES[1]}-cache"),
        }
        return server(WEIGHT_PROXIES[1], WEIGHT_PROXIES[0], environment, int(port))


@contextmanager
def running_fleet(options: StackOptions, output: TextIO) -> Iterator[Fleet]:
    """A started fleet that is stopped in the end, whatever happens."""
    with ExitStack() as cleanup:
        cleanup.enter_context(locked(options.data_dir))
        relays = {
            name: cleanup.enter_context(Relay()) for name in (ORCHESTRATOR, WEIGHT_PROXIES[0], S3)
        }
        fleet = on_own_ports(lambda: _started(options, relays, output))
        cleanup.callback(fleet.close)
        yield fleet


def _started(options: StackOptions, relays: Mapping[str, Relay], output: TextIO) -> Fleet:
    through_relays = {
        "OFFBEAT_ORCHESTRATOR_URL": relays[ORCHESTRATOR].url,
        "OFFBEAT_WEIGHT_PROXY_URL": relays[WEIGHT_PROXIES[0]].url,
        "OFFBEAT_S3_ENDPOINT_URL": relays[S3].url,
    }
    stack = Stack(replace(options, settings={**options.settings, **through_relays}))
    second = f"http://127.0.0.1:{parts.free_port()}"
    relays[ORCHESTRATOR].upstreams = (stack.addresses.orchestrator,)
    relays[WEIGHT_PROXIES[0]].upstreams = (stack.addresses.weight_proxy, second)
    relays[S3].upstreams = (stack.addresses.s3,)
    fleet = Fleet(stack, relays, second)
    try:
        fleet.start(output)
    except BaseException:
        fleet.close()
        raise
    return fleet
