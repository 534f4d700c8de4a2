"""A link between two machines, made of a network namespace: one machine is this one, the other has
the namespace. Needs root and iproute2."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "offbeat-node-1"
HERE, THERE = "offbeat0", "offbeat1"
"""The ends of the link, in this machine and in the other one."""
ADDRESSES = ("10.217.0.1", "10.217.0.2")
COUNTERS = ("rx_bytes", "tx_bytes")


@dataclass(frozen=True)
class Link:
    """A link that is up."""

    @property
    def moved_bytes(self) -> int:
        """In both directions, since it is up."""
        statistics = Path(f"/sys/class/net/{HERE}/statistics")
        return sum(int((statistics / name).read_text()) for name in COUNTERS)

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """As it is run on this machine (0) or on the other one (1)."""
        return [*(_inside() if node else ()), *command]

    def lose(self) -> None:
        """All programs of the other machine end, from one moment to the next."""
        listed = subprocess.run(
            ["ip", "netns", "pids", NAMESPACE], check=True, stdout=subprocess.PIPE, text=True
        )
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def interface(self, node: int) -> str:
        """The node's end."""
        return (HERE, THERE)[node]


@contextmanager
def linked(mbit_per_s: int | None) -> Iterator[Link]:
    """The other machine, behind a link of this rate; as fast as memory where there is none."""
    _ip("netns", "add", NAMESPACE)
    try:
        _ip("link", "add", HERE, "type", "veth", "peer", "name", THERE, "netns", NAMESPACE)
        _run(*_inside(), "ip", "link", "set", "lo", "up")
        for prefix, end, address in zip(((), _inside()), (HERE, THERE), ADDRESSES, strict=True):
            _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", end)
            _run(*prefix, "ip", "link", "set", end, "up")
            if mbit_per_s is not None:
                limit = ("rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "400ms")
                _run(*prefix, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield Link()
    finally:
        _ip("netns", "delete", NAMESPACE)


def _inside() -> tuple[str, ...]:
    return ("ip", "netns", "exec", NAMESPACE)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
