"""A service as a process of its own, as a container runs it: its memory, its log and that it lives
on can only be seen from outside."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

import httpx

from offbeat.errors import UnavailableError
from offbeat.settings import ObjectStoreSettings
from scripts import parts
from scripts.processes import PortTakenError, answers

API_KEY, WORKER_TOKEN = "admin-key-0123456789", "worker-token-0123456789"
JSON = {"authorization": f"Bearer {API_KEY}", "content-type": "application/json"}
REFUSED = "A request was refused."
PATIENCE_S = 60
"""Of a test, for an answer."""


@dataclass(frozen=True, kw_only=True)
class ServiceProcess:
    """Where it listens, and what can be seen of it."""

    url: str
    pid: int
    log: Path
    http: httpx.Client

    @property
    def port(self) -> int:
        """On 127.0.0.1."""
        return httpx.URL(self.url).port or 0

    def connect(self) -> socket.socket:
        """A bare connection, for what no HTTP client would send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def refusal_of(self, request: str) -> tuple[int, str]:
        """Status and detail of the answer to the beginning of a request, sent as it is."""
        with self.connect() as connection:
            connection.sendall(request.encode())
            response = HTTPResponse(connection)
            response.begin()
            return response.status, json.loads(response.read())["detail"]

    def refusals(self) -> list[str]:
        """The reasons of all requests that were refused so far."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line["reason"] for line in lines if line["event"] == REFUSED]

    def errors(self) -> list[str]:
        """What was logged as an error."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if json.loads(line)["level"] not in ("info", "warning")]

    def check_is_up(self) -> None:
        """It is the same process, and ready."""
        assert self.http.get("/readyz").status_code == 200


def store_environment(s3: ObjectStoreSettings) -> dict[str, str]:
    """The variables that name the store to a process."""
    return {
        "OFFBEAT_S3_ENDPOINT_URL": s3.endpoint_url or "",
        "OFFBEAT_S3_BUCKET": s3.bucket,
        "OFFBEAT_S3_ACCESS_KEY_ID": s3.access_key_id,
        "OFFBEAT_S3_SECRET_ACCESS_KEY": s3.secret_access_key.get_secret_value(),
    }


@contextmanager
def running_service(
    module: str, folder: Path, s3: ObjectStoreSettings, environment: Mapping[str, str]
) -> Iterator[ServiceProcess]:
    """Start `python -m services.<module>` with its state in the folder; stop it in the end."""
    port = parts.free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / f"{module}.log"
    own = {
        "OFFBEAT_LOG_FORMAT": "json",
        **store_environment(s3),
        "OFFBEAT_ORCHESTRATOR_PORT": str(port),
        "OFFBEAT_ORCHESTRATOR_DATABASE_URL": f"sqlite:///{folder}/orchestrator.db",
        "OFFBEAT_WEIGHT_PROXY_PORT": str(port),
        "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{folder}/weight-proxy.db",
        "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / "cache"),
    }
    part = parts.Part(
        name=module,
        command=(sys.executable, "-m", f"services.{module}"),
        environment={**own, **environment},
        port=port,
        is_ready=lambda: answers(f"{url}/readyz"),
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command,
            env={**os.environ, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        parts.wait_until_ready(part, process)
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            yield ServiceProcess(url=url, pid=process.pid, log=log, http=http)
        assert process.poll() is None, "it ended during the test"
    except (AssertionError, UnavailableError, PortTakenError) as error:
        error.add_note(log.read_text())
        raise
    finally:
        process.terminate()
        process.wait(timeout=60)
