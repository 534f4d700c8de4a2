"""Waiting for what containers do."""

import time
from collections.abc import Callable

from scripts.compose.commands import ComposeTestError

POLL_S = 1.0


def wait_until(
    condition: Callable[[], bool], timeout_s: float, complaint: Callable[[], str]
) -> None:
    """Return once it holds; raises `ComposeTestError` with the complaint when that takes longer."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ComposeTestError(f"waited {timeout_s:.0f} s: {complaint()}")
        time.sleep(POLL_S)
