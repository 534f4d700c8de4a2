"""What a tree of processes needs: one owner of its folder, an orderly end, and a look at the rest.

`stack.py` says which processes there are.
"""

import fcntl
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

STOP_GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL: a worker that is at the end of its job still hands it in."""
WORKER_GRACE_S = 5.0
"""When a worker hands back what it has not finished; it needs a few seconds more to end."""
LOG_LINES_SHOWN = 25


class StackError(Exception):
    """A process of the stack ended, or never became ready."""


class PortTakenError(StackError):
    """Another program was faster at a port that had been free."""


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Hold the data folder, so that a second stack on it is refused instead of spoiling it."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"a stack is already running on {data_dir}: stop it, or name another --data-dir"
            ) from None
        yield


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGHUP end this process as Ctrl-C does: through its `finally` blocks."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)


def on_ranks(ranks: int, *options: str) -> tuple[str, ...]:
    """Python on so many ranks of torchrun, all on this machine; what they run comes after it."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return (sys.executable, *torchrun, *options)


def end(processes: list[subprocess.Popen[bytes]], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to all, and SIGKILL to those that are left after the grace period."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_lines(path: Path) -> str:
    """The end of a log."""
    with path.open(errors="replace") as log:
        return "".join(deque(log, maxlen=LOG_LINES_SHOWN))


def answers(url: str) -> bool:
    """Whether a health route says 200."""
    try:
        return httpx.get(url, timeout=2).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def worker_reports(url: str, api_key: str, worker_id: str) -> bool:
    """Whether the orchestrator's list of workers has this one alive."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        page = httpx.get(url, headers=headers, timeout=2).raise_for_status().json()
    except httpx.HTTPError:
        return False
    return any(worker["id"] == worker_id and worker["status"] == "alive" for worker in page["data"])
