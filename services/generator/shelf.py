"""The proved versions of one run that an engine holds, and which jobs use each.

Plain bookkeeping between threads: what a version is made of and how it is loaded is decided
elsewhere.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.contracts.weights import Canary
from offbeat.errors import UnavailableError

CHECK_INTERVAL_S = 0.5
"""How soon a job that waits for a version notices that it was taken away."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A proved version as a job uses it."""

    name: str
    """Under which the engine knows it."""
    version: int
    adapter_sha256: str
    folder: Path
    """Its files, as long as the engine holds it."""
    canary: Canary


class Shelf:
    """Keeps the newest version, what is lent out, and at most `spare_max` others."""

    def __init__(self, spare_max: int, drop: Callable[[Policy], None]) -> None:
        self._spare_max = spare_max
        self._drop = drop
        self._changed = threading.Condition()
        self._policies: dict[int, Policy] = {}
        self._leases: dict[int, int] = {}
        self._busy: set[str] = set()
        """Names that a thread is loading or unloading: no other thread may do either."""
        self._used_at = time.monotonic()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing can be added or lent any more."""
        return self._closed

    def touch(self) -> bool:
        """Count as used now; false where it is closed already."""
        with self._changed:
            self._used_at = time.monotonic()
            return not self._closed

    def idle_s(self) -> float:
        """How long no job has used it; 0 while one does."""
        with self._changed:
            return 0.0 if any(self._leases.values()) else time.monotonic() - self._used_at

    def policies(self) -> list[Policy]:
        """Every version that may be lent now, oldest first."""
        with self._changed:
            return [self._policies[version] for version in sorted(self._policies)]

    def close(self) -> None:
        """Drop everything; what is lent out when it comes back."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop_surplus()

    def pause(self, wait_s: float) -> None:
        """Wait, but not beyond the closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, wait_s)

    def add(self, policy: Policy) -> None:
        """Put a proved version up for use; it counts as lent to the caller."""
        with self._changed:
            if self._closed:
                raise UnavailableError(f"{policy.name} came too late: its run was given up here")
            self._policies[policy.version] = policy
            self._leases[policy.version] = 1
            self._changed.notify_all()

    def lend(self, version: int) -> Policy | None:
        """This very version, or None where it is not at hand."""
        with self._changed:
            if version in self._policies:
                self._leases[version] += 1
            return self._policies.get(version)

    def lend_newest(
        self, min_version: int, check: Callable[[], None], timeout_s: float
    ) -> Policy | None:
        """The newest version once it is at least `min_version`; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while max(self._policies, default=-1) < min_version:
                check()
                if self._closed or time.monotonic() > deadline:
                    return None
                self._changed.wait(CHECK_INTERVAL_S)
            version = max(self._policies)
            self._leases[version] += 1
            return self._policies[version]

    def give_back(self, policy: Policy) -> None:
        """End a loan."""
        with self._changed:
            self._leases[policy.version] -= 1
        self._drop_surplus()

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """No other thread loads or drops this name within the block."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            self._release({name})

    def _drop_surplus(self) -> None:
        with self._changed:
            dropped = [self._policies.pop(version) for version in self._surplus()]
            for policy in dropped:
                del self._leases[policy.version]
            names = {policy.name for policy in dropped}
            self._busy |= names
        try:
            for policy in dropped:
                self._drop(policy)
        finally:
            self._release(names)

    def _surplus(self) -> list[int]:
        """What may go, oldest first: superseded, not lent out, and more than are to be kept."""
        superseded = sorted(self._policies)[: None if self._closed else -1]
        free = [version for version in superseded if not self._leases[version]]
        kept = 0 if self._closed else self._spare_max
        return free[: max(len(superseded) - kept, 0)]

    def _release(self, names: set[str]) -> None:
        with self._changed:
            self._busy -= names
            self._changed.notify_all()
