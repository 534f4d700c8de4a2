"""A vLLM server as a subprocess: started, watched, started again, ended.

One thread starts it and starts it again when it has ended, each time after a longer pause; another
passes its lines on to the log. It gives up on a server that does not stay up.
"""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from offbeat.errors import UnavailableError

log = structlog.get_logger(__name__)

STARTS_MAX = 6
"""In a row, none of which stayed up."""
STEADY_S = 600.0
"""A server that was up for so long did start; what ends it then is another trouble."""
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
STOP_GRACE_S = 20.0
"""Between SIGTERM and SIGKILL: vLLM ends its workers first."""
LINE_CHARS_MAX = 2000
READY_POLL_S = 0.25


class VllmServer:
    """Starts with the object and ends with `close`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_give_up: Callable[[], None],
        *,
        pause_first_s: float = PAUSE_FIRST_S,
    ) -> None:
        self._command = tied_to_this_process(command)
        self._environment = {**os.environ, **environment}
        self._on_give_up = on_give_up
        self._pause_s = pause_first_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._supervise, name="vllm", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str | None:
        """Why it is not started any more; None while it is."""
        return self._problem

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        with self._lock:
            return self._process.pid if self._process else None

    def close(self) -> None:
        """End the server and all its children."""
        with self._lock:
            self._closing.set()
            process = self._process
        if process is not None:
            end_group(process)
        self._thread.join()

    def _supervise(self) -> None:
        failures, last = 0, ""
        while failures < STARTS_MAX and not self._closing.is_set():
            started_at = time.monotonic()
            try:
                last = f"exit code {self._run()}"
            except OSError as error:
                last = str(error)
            if self._closing.is_set():
                return
            failures = 1 if time.monotonic() - started_at > STEADY_S else failures + 1
            pause_s = min(self._pause_s * 2 ** (failures - 1), PAUSE_MAX_S)
            log.error("vLLM ended.", reason=last, in_a_row=failures, pause_s=pause_s)
            self._closing.wait(pause_s)
        if not self._closing.is_set():
            self._problem = (
                f"vLLM ended {failures} times in a row ({last}): its last lines in this worker's "
                "log say why; OFFBEAT_VLLM_PYTHON and OFFBEAT_VLLM_ARGS decide how it starts"
            )
            log.error("vLLM is not started any more.", reason=self._problem)
            self._on_give_up()

    def _run(self) -> int:
        """One life of the server, until its exit code."""
        with self._lock:
            if self._closing.is_set():
                return 0
            process = self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        log.info("vLLM starts.", pid=process.pid)
        threading.Thread(target=pass_lines_on, args=(process,), name="vllm-log").start()
        code = process.wait()
        # Its engine and its workers outlive a server that was killed, and would keep the GPU.
        end_group(process)
        return code


def pass_lines_on(process: subprocess.Popen[str]) -> None:
    """What the process and its children say goes to the log, until the last of them has ended."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            log.info("vLLM says.", line=line.rstrip()[:LINE_CHARS_MAX])


def wait_until_healthy(
    is_healthy: Callable[[], bool], problem: Callable[[], str | None], timeout_s: float
) -> None:
    """Return once the server answers; `UnavailableError` after the timeout, or where it is given
    up. `problem` is asked between two looks, and may end the wait by raising."""
    deadline = time.monotonic() + timeout_s
    while not is_healthy():
        reason = problem()
        if reason is not None:
            raise UnavailableError(reason)
        if time.monotonic() > deadline:
            raise UnavailableError(f"vLLM was not ready after {timeout_s:.0f} s")
        time.sleep(READY_POLL_S)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tied_to_this_process(command: Sequence[str]) -> tuple[str, ...]:
    """The command, which the kernel ends when this process is killed: vLLM would else keep the GPU.

    `setpriv` is part of Linux distributions; where there is none, only an orderly end stops vLLM.
    """
    setpriv = shutil.which("setpriv")
    return (*((setpriv, "--pdeathsig", "TERM", "--") if setpriv else ()), *command)


def end_group(process: subprocess.Popen[str]) -> None:
    """SIGTERM to the process and its children, and SIGKILL to those that stay."""
    _signal_group(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
