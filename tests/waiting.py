"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable

POLL_S = 0.01
DEADLINE_S = 60.0
"""Far more than anything here takes on a calm machine."""


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return once it holds; fail when that takes too long."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(POLL_S)
