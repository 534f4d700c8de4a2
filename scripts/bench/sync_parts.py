"""The processes of the weight-sync benchmark: the S3 server, the weight-proxy, the generators."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO
from uuid import uuid4

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from scripts import parts
from scripts.bench.contender import thread_limits
from scripts.bench.sync_generator import GeneratorTask, Mark, Steps
from scripts.parts import Part
from scripts.processes import StackError, answers, end, last_lines

MARK_TIMEOUT_S = 120.0
"""Between two marks while a version is on its way; a real engine starts within."""
CLOSING_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SyncServers:
    """A store and a weight-proxy that run."""

    store: S3ObjectStore
    objects: Path
    """Where the store keeps its objects."""
    proxy_url: str
    metrics_url: str

    def store_bytes(self) -> float:
        """What has passed through the store in either direction, by its own count."""
        text = httpx.get(self.metrics_url).raise_for_status().text
        return next(
            family.samples[0].value
            for family in text_string_to_metric_families(text)
            if family.name.startswith("rclone_bytes_transferred")
        )


@contextmanager
def running_servers(folder: Path) -> Iterator[SyncServers]:
    """Start both on an empty folder; stop them in the end."""
    s3_port, proxy_port, metrics_port = (parts.free_port() for _ in range(3))
    settings = ObjectStoreSettings(
        endpoint_url=f"http://127.0.0.1:{s3_port}", secret_access_key=SecretStr(uuid4().hex)
    )
    s3 = parts.s3(s3_port, folder / "s3", settings)
    url = f"http://127.0.0.1:{proxy_port}"
    proxy = Part(
        name="weight_proxy",
        command=(sys.executable, "-m", "services.weight_proxy"),
        environment={
            "OFFBEAT_S3_ENDPOINT_URL": str(settings.endpoint_url),
            "OFFBEAT_S3_SECRET_ACCESS_KEY": settings.secret_access_key.get_secret_value(),
            "OFFBEAT_WEIGHT_PROXY_PORT": str(proxy_port),
            "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{folder}/weight-proxy.db",
            "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / "weight-proxy-cache"),
        },
        is_ready=lambda: answers(f"{url}/readyz"),
    )
    metered = replace(
        s3, environment={**s3.environment, "RCLONE_METRICS_ADDR": f"127.0.0.1:{metrics_port}"}
    )
    with running(metered, folder), running(proxy, folder):
        yield SyncServers(
            store=S3ObjectStore.connect(settings),
            objects=folder / "s3" / settings.bucket,
            proxy_url=url,
            metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
        )


@contextmanager
def running(part: Part, folder: Path) -> Iterator[None]:
    """Start a part and wait until it is ready; stop it in the end."""
    with (folder / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            part.command,
            env={**os.environ, **part.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            parts.wait_until_ready(part, process)
            yield
        finally:
            end([process])


class Generators:
    """Processes that follow the run, and what they have told so far."""

    def __init__(self, tasks: Mapping[str, GeneratorTask], logs: Path) -> None:
        self._tasks = tasks
        self._logs = logs
        self._told: SimpleQueue[Mark | None] = SimpleQueue()
        """None once a process says no more."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.marks: list[Mark] = []

    def start(self, threads: int) -> None:
        """Start all at once, each with so many threads."""
        for name, task in self._tasks.items():
            task.folder.mkdir(parents=True)
            with self._log_path(name).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "scripts.bench.sync_generator", task.model_dump_json()],
                    env={**os.environ, **thread_limits(threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self._processes[name] = process
            assert process.stdout is not None
            Thread(target=self._listen, args=(process.stdout,), daemon=True).start()

    def wait_until_sampled(self, version: int) -> None:
        """Return once every generator has drawn from the version."""
        waiting = set(self._tasks)
        while waiting:
            mark = None
            with suppress(Empty):
                mark = self._told.get(timeout=MARK_TIMEOUT_S)
            if mark is None:
                name = min(waiting)
                raise StackError(
                    f"{name} has not drawn from version {version}:\n"
                    f"{last_lines(self._log_path(name))}"
                )
            self.marks.append(mark)
            if mark.stage == "sampled" and mark.version == version:
                waiting.remove(mark.generator)

    def finish(self) -> dict[str, Steps]:
        """End the processes in order; when each made its steps."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            process.wait(CLOSING_TIMEOUT_S)
        return {
            name: Steps.model_validate_json((task.folder / "steps.json").read_bytes())
            for name, task in self._tasks.items()
        }

    def stop(self) -> None:
        """End what still runs."""
        end([process for process in self._processes.values() if process.poll() is None])

    def _log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _listen(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._told.put(Mark.model_validate_json(line))
        self._told.put(None)
