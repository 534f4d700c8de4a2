"""CPU time and memory of processes, from `/proc`, and the sizes of what they keep."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """CPU seconds that each process had had by a moment, its children's included."""

    at_s: float
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What was held at a moment."""

    at_s: float
    steps: int
    rss_bytes: Mapping[str, int]
    database_bytes: int
    store_bytes: int
    store_objects: int


@dataclass(frozen=True, kw_only=True)
class Meter:
    """The processes of a case by name, and where their data lie."""

    pids: Mapping[str, int]
    database_bytes: Callable[[], int]
    objects: Path

    def reading(self) -> Reading:
        """As of now; this process, which simulates the fleet, without its children."""
        cpu_s = {name: tree_cpu_s(pid) for name, pid in self.pids.items()}
        return Reading(at_s=time.monotonic(), cpu_s=cpu_s | {"simulation": time.process_time()})

    def sizes(self, steps: int) -> Sizes:
        """As of now; it walks through the store."""
        found = file_sizes(self.objects)
        return Sizes(
            at_s=time.monotonic(),
            steps=steps,
            rss_bytes={name: rss_bytes(pid) for name, pid in self.pids.items()},
            database_bytes=self.database_bytes(),
            store_bytes=sum(found),
            store_objects=len(found),
        )


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process and of all its children, dead ones included."""
    process = Path(f"/proc/{pid}")
    try:
        # The name, in parentheses, may hold anything.
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        children = (process / f"task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0.0  # It has just ended, and its parent has its time now.
    own_s = sum(map(int, fields[11:15])) / TICKS_A_SECOND
    return own_s + sum(tree_cpu_s(int(child)) for child in children)


def rss_bytes(pid: int) -> int:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def file_sizes(folder: Path) -> list[int]:
    """Those of all files below a folder that others are changing."""
    sizes: list[int] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(parent) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return sizes
