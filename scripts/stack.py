"""The whole of Offbeat on one machine, every part a process of its own.

    python -m scripts.stack [--data-dir .offbeat] [--generators 1] [--trainers 1] [--vllm-python P]

starts Valkey, an S3 server, the orchestrator, the weight-proxy, generators and trainers with the
commands that a container would run, and stays until Ctrl-C. The first process that ends takes the
rest with it, and its last log lines are shown. State lies in the data folder: starting again on it
goes on where it stopped.
"""

import argparse
import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypeVar
from uuid import uuid4

from pydantic import SecretStr
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from offbeat.errors import UnavailableError
from offbeat.settings import ObjectStoreSettings
from scripts import parts
from scripts.parts import Part
from scripts.processes import (
    WORKER_GRACE_S,
    PortTakenError,
    StackError,
    answers,
    end,
    interrupt_on_signals,
    last_lines,
    locked,
    on_ranks,
    worker_reports,
)

WATCH_INTERVAL_S = 0.2
ORCHESTRATOR_PORT = 8000
WEIGHT_PROXY_PORT = 8001
WORKER_ROLES = ("generator", "trainer")
PORT_TAKEN = os.strerror(errno.EADDRINUSE).lower()
"""In a program's last words. Who listens there can't be asked afterwards: it may have ended too."""
STARTS_MAX = 5
"""Of a stack, each time on other ports, while others take them."""
RANK_RESTARTS_MAX = 100
"""Of a trainer's ranks together, after one of them died."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """What to start, and where its state lies."""

    data_dir: Path
    generators: int = 1
    trainers: int = 1
    trainer_ranks: int = 1
    """Processes of each trainer, which hold the model together."""
    vllm_python: Path | None = None
    """The Python of an environment with vLLM, for generators that sample with it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """`OFFBEAT_*` variables for every service, beyond the addresses."""

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.data_dir / "logs"

    @property
    def model_cache(self) -> Path:
        """Base models, shared by all workers."""
        return self.data_dir / "models"


@dataclass(frozen=True, kw_only=True)
class Addresses:
    """Where the parts of one stack listen."""

    orchestrator: str
    weight_proxy: str
    redis: str
    s3: str


class Stack:
    """The processes, in the order in which they were started."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self._running: list[tuple[Part, subprocess.Popen[bytes]]] = []
        self._ports = {
            "orchestrator": parts.port_near(ORCHESTRATOR_PORT),
            "weight_proxy": parts.port_near(WEIGHT_PROXY_PORT),
            "redis": parts.free_port(),
            "s3": parts.free_port(),
        }
        self.addresses = Addresses(
            orchestrator=f"http://127.0.0.1:{self._ports['orchestrator']}",
            weight_proxy=f"http://127.0.0.1:{self._ports['weight_proxy']}",
            redis=f"redis://127.0.0.1:{self._ports['redis']}/0",
            s3=f"http://127.0.0.1:{self._ports['s3']}",
        )
        self.object_store = ObjectStoreSettings(
            endpoint_url=self.addresses.s3, secret_access_key=SecretStr(uuid4().hex)
        )

    def start(self, output: TextIO) -> None:
        """Start every part, stage by stage; raises `StackError` when one does not come up."""
        for stage in self._stages():
            names = ", ".join(part.name for part in stage)
            print(f"  starting {names} …", end="", file=output, flush=True)
            began = time.monotonic()
            processes = [self._launch(part) for part in stage]
            for part, process in zip(stage, processes, strict=True):
                self._wait_until_ready(part, process)
            print(f" ready after {time.monotonic() - began:.1f} s", file=output)

    def watch(self) -> None:
        """Raise `StackError` if a process has ended."""
        for part, process in self._running:
            if process.poll() is not None:
                raise StackError(self._obituary(part, process.returncode))

    def stop(self) -> None:
        """End the workers, which still hand in what they have, then the services, then the rest."""
        workers = [pair for pair in self._running if pair[0].name.startswith(WORKER_ROLES)]
        for pairs in (workers, self._running):
            end([process for _, process in pairs if process.poll() is None])
        self._running.clear()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """The process of a part, for tests that do it harm."""
        return next(process for part, process in self._running if part.name == name)

    def restart(self, name: str, **changes: str) -> None:
        """Start a part again whose process has ended, with the same command; `changes` are
        variables that only this life of it has."""
        index, part = next(
            (i, part) for i, (part, _) in enumerate(self._running) if part.name == name
        )
        del self._running[index]
        self._wait_until_ready(part, self._launch(part, **changes))

    def add(self, part: Part) -> None:
        """Start one part more."""
        self._wait_until_ready(part, self._launch(part))

    def _stages(self) -> Iterator[list[Part]]:
        """Parts that may start at once, in the order in which they need one another."""
        folder = self.options.data_dir
        yield [
            parts.valkey(self._ports["redis"], folder / "valkey"),
            parts.s3(self._ports["s3"], folder / "s3", self.object_store),
        ]
        environment = self.environment()
        yield [
            server(name, name, environment, self._ports[name])
            for name in ("orchestrator", "weight_proxy")
        ]
        yield [
            self._worker(role, f"{role}-{number}", environment)
            for role, count in zip(
                WORKER_ROLES, (self.options.generators, self.options.trainers), strict=True
            )
            for number in range(1, count + 1)
        ]

    def _worker(self, role: str, name: str, environment: Mapping[str, str]) -> Part:
        computing = self.options.generators + self.options.trainers * self.options.trainer_ranks
        threads = str(max(1, (os.cpu_count() or 1) // computing))
        # Two processes that each use all cores lose more than they gain.
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        own = {
            # Some tasks of reasoning-gym walk over sets: one order for all generators.
            "PYTHONHASHSEED": "0",
            "OFFBEAT_WORKER_ID": name,
            "OFFBEAT_DATA_DIR": str(self.options.data_dir / name),
            "OFFBEAT_MODEL_CACHE_DIR": str(self.options.model_cache),
        }
        url = f"{self.addresses.orchestrator}/v1/workers"
        key = environment.get("OFFBEAT_API_KEY") or os.environ.get("OFFBEAT_API_KEY", "")
        return Part(
            name=name,
            command=_command(role, self.options.trainer_ranks if role == "trainer" else 1),
            environment={**environment, **limits, **own},
            is_ready=lambda: worker_reports(url, key, name),
        )

    def environment(self) -> dict[str, str]:
        """The `OFFBEAT_*` variables of every service."""
        folder = self.options.data_dir
        store = self.object_store
        return {
            "OFFBEAT_REDIS_URL": self.addresses.redis,
            "OFFBEAT_S3_ENDPOINT_URL": self.addresses.s3,
            "OFFBEAT_S3_BUCKET": store.bucket,
            "OFFBEAT_S3_ACCESS_KEY_ID": store.access_key_id,
            "OFFBEAT_S3_SECRET_ACCESS_KEY": store.secret_access_key.get_secret_value(),
            "OFFBEAT_ORCHESTRATOR_URL": self.addresses.orchestrator,
            "OFFBEAT_ORCHESTRATOR_PORT": str(self._ports["orchestrator"]),
            "OFFBEAT_ORCHESTRATOR_DATABASE_URL": f"sqlite:///{folder}/orchestrator.db",
            "OFFBEAT_WEIGHT_PROXY_URL": self.addresses.weight_proxy,
            "OFFBEAT_WEIGHT_PROXY_PORT": str(self._ports["weight_proxy"]),
            "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{folder}/weight-proxy.db",
            "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / "weight-proxy-cache"),
            "OFFBEAT_GRACE_S": f"{WORKER_GRACE_S:g}",
            **self._engine(),
            **self.options.settings,
        }

    def _engine(self) -> dict[str, str]:
        python = self.options.vllm_python
        return {"OFFBEAT_ENGINE": "vllm", "OFFBEAT_VLLM_PYTHON": str(python)} if python else {}

    def _launch(self, part: Part, **changes: str) -> subprocess.Popen[bytes]:
        self.options.logs.mkdir(parents=True, exist_ok=True)
        with self._log_path(part).open("ab") as log:
            process = subprocess.Popen(
                part.command,
                env={**os.environ, **part.environment, **changes},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches this process only, which ends them in order.
                start_new_session=True,
            )
        self._running.append((part, process))
        return process

    def _wait_until_ready(self, part: Part, process: subprocess.Popen[bytes]) -> None:
        try:
            parts.wait_until_ready(part, process)
        except UnavailableError as error:
            obituary = self._obituary(part, process.poll())
            failure = PortTakenError if PORT_TAKEN in obituary.lower() else StackError
            raise failure(f"{error}\n{obituary}") from error

    def _log_path(self, part: Part) -> Path:
        return self.options.logs / f"{part.name}.log"

    def _obituary(self, part: Part, code: int | None) -> str:
        path = self._log_path(part)
        state = "is not ready" if code is None else f"ended with exit code {code}"
        return f"{part.name} {state}. The last lines of {path}:\n{last_lines(path)}"


@contextmanager
def running_stack(options: StackOptions, output: TextIO) -> Iterator[Stack]:
    """A started stack that is stopped in the end, whatever happens."""
    with locked(options.data_dir):
        stack = on_own_ports(lambda: _started(options, output))
        try:
            yield stack
        finally:
            stack.stop()


def on_own_ports(start: Callable[[], T]) -> T:
    """What `start` gives; it is called again where another program was faster at one of the
    ports that it chose."""
    return Retrying(
        retry=retry_if_exception_type(PortTakenError),
        stop=stop_after_attempt(STARTS_MAX),
        reraise=True,
    )(start)


def _started(options: StackOptions, output: TextIO) -> Stack:
    stack = Stack(options)
    try:
        stack.start(output)
    except BaseException:
        stack.stop()
        raise
    return stack


def server(name: str, module: str, environment: Mapping[str, str], port: int) -> Part:
    """A process of a service that listens on this port."""
    return Part(
        name=name,
        command=_command(module),
        environment=environment,
        port=port,
        is_ready=lambda: answers(f"http://127.0.0.1:{port}/readyz"),
    )


def _command(module: str, ranks: int = 1) -> tuple[str, ...]:
    restarts = f"--max-restarts={RANK_RESTARTS_MAX}"
    python = on_ranks(ranks, restarts) if ranks > 1 else (sys.executable,)
    return (*python, "-m", f"services.{module}")


def main() -> int:
    """Start, say where everything is, stay."""
    parser = argparse.ArgumentParser(description="Run all of Offbeat on this machine.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--generators", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument(
        "--trainer-ranks",
        type=int,
        default=1,
        help="processes that hold a model together",
    )
    parser.add_argument("--vllm-python", type=Path, help="sample with the vLLM of this Python")
    options = StackOptions(**vars(parser.parse_args()))
    interrupt_on_signals()
    try:
        with running_stack(options, sys.stdout) as stack:
            print(_welcome(stack))
            while True:
                stack.watch()
                time.sleep(WATCH_INTERVAL_S)
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Start again on the same data folder to go on.")
        return 0


def _welcome(stack: Stack) -> str:
    return f"""
  REST API       {stack.addresses.orchestrator}   (documentation at /docs)
  weight-proxy   {stack.addresses.weight_proxy}
  logs           {stack.options.logs}/

  export OFFBEAT_URL={stack.addresses.orchestrator}
  .venv/bin/offbeat submit examples/chain_sum.toml --watch

Ctrl-C stops everything."""


if __name__ == "__main__":
    sys.exit(main())
