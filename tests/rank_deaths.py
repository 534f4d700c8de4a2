"""Killing a rank of the trainer of a running stack."""

import io
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from offbeat.client import OffbeatClient
from scripts.stack import Stack, StackOptions, running_stack
from tests.waiting import wait_until

RUN_TIMEOUT_S = 240.0
READY = "The trainer is ready."


def ranks_of(torchrun: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The trainer's processes, by rank."""
    processes = psutil.Process(torchrun.pid).children()
    return sorted(processes, key=lambda process: int(process.environ()["RANK"]))


def times_started(stack: Stack) -> int:
    return (stack.options.logs / "trainer-1.log").read_text().count(READY)


def kill_rank(stack: Stack, rank: int, is_time: Callable[[], bool]) -> None:
    """Kill it at its time, and return when the trainer is back."""
    wait_until(is_time, RUN_TIMEOUT_S)
    before = times_started(stack)
    os.kill(ranks_of(stack.process("trainer-1"))[rank].pid, signal.SIGKILL)
    wait_until(lambda: times_started(stack) > before, RUN_TIMEOUT_S)


@contextmanager
def ranked_stack(data_dir: Path) -> Iterator[tuple[Stack, OffbeatClient]]:
    """A stack whose trainer has two ranks, and a client of it."""
    options = StackOptions(data_dir=data_dir, trainer_ranks=2)
    with (
        running_stack(options, io.StringIO()) as stack,
        OffbeatClient(stack.addresses.orchestrator) as client,
    ):
        yield stack, client
