"""The services of `docker-compose.yml`, as a project of the test's own."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.client import OffbeatClient
from scripts.compose.commands import Commands
from scripts.compose.engine import Engine
from scripts.compose.waiting import wait_until

PROJECT = "offbeat-test"
COMPOSE_FILE = "docker-compose.yml"
OFFLINE_FILE = "deploy/compose/offline.yaml"
SECRETS = Path("deploy/compose/secrets")
START_TIMEOUT_S = "600"
RESTART_TIMEOUT_S = 180.0
"""From the death of a container until a new one is healthy, a worker's imports included."""
CORES_PER_WORKER = 2
CONTROL_PLANE = ("orchestrator", "weight-proxy")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container, as the engine describes it."""

    id: str
    service: str
    status: str
    health: str | None
    """None where the container has no health check."""
    restarts: int
    exit_code: int

    @property
    def is_well(self) -> bool:
        """Whether it runs and is healthy, or is a job that has ended well."""
        if self.status == "exited":
            return self.exit_code == 0
        return self.status == "running" and self.health in (None, "healthy")


@dataclass(frozen=True, kw_only=True)
class ComposeStack:
    """A project: its containers, and what one does to them."""

    docker: str
    commands: Commands
    port: int

    @property
    def url(self) -> str:
        """The orchestrator's."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_key(self) -> str:
        """The administrator's."""
        return (SECRETS / "offbeat_api_key").read_text()

    def client(self) -> OffbeatClient:
        """A client of the orchestrator."""
        return OffbeatClient(self.url, self.api_key)

    def up(self, *options: str) -> None:
        """Start what does not run, and wait until all is healthy."""
        self._compose("up", "--detach", "--wait", "--wait-timeout", START_TIMEOUT_S, *options)

    def upgrade(self) -> None:
        """Migrate and replace orchestrator and weight-proxy; the workers stay as they are."""
        self._compose("run", "--rm", "-T", "migrations")
        self.up("--force-recreate", "--no-deps", *CONTROL_PLANE)

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self._compose("--profile", "*", "down", "--volumes", "--timeout", "40")

    def execute(self, service: str, script: str) -> str:
        """What a shell command in the first container of a service writes."""
        return self.commands.output(
            self.docker, "compose", "exec", "-T", service, "sh", "-c", script
        )

    def kill(self, service: str) -> None:
        """End the first container of a service as a crash does, and wait for it to be back.

        `docker kill` would count as a stop that somebody wanted. So all processes are killed from
        inside, but for the container's init.
        """
        before = self.containers(service)[0]
        self.commands.attempt(self.docker, "exec", before.id, "sh", "-c", "kill -KILL -1")

        def is_back() -> bool:
            now = next(each for each in self.containers(service) if each.id == before.id)
            return now.restarts > before.restarts and now.is_well

        wait_until(is_back, RESTART_TIMEOUT_S, lambda: f"{self.containers(service)}")

    def containers(self, *services: str) -> list[Container]:
        """All of them, ended jobs too, or those of some services."""
        listed = self.commands.output(
            self.docker, "compose", "ps", "--all", "--quiet", *services
        ).split()
        described = json.loads(self.commands.output(self.docker, "inspect", *listed))
        return [_container(description) for description in described]

    def logs(self) -> str:
        """What all containers wrote last."""
        return self.commands.attempt(
            self.docker, "compose", "logs", "--no-color", "--tail", "60"
        ).stdout

    def _compose(self, *arguments: str) -> None:
        self.commands.run(self.docker, "compose", *arguments)


def compose_environment(engine: Engine, port: int, *, pulled: bool) -> Mapping[str, str]:
    """The variables of Compose and of the file, whatever `.env` says."""
    threads = max(1, (os.cpu_count() or 1) // CORES_PER_WORKER)
    return {
        **engine.environment,
        "COMPOSE_PROJECT_NAME": PROJECT,
        "COMPOSE_FILE": COMPOSE_FILE if pulled else f"{COMPOSE_FILE}:{OFFLINE_FILE}",
        "COMPOSE_PROFILES": "",
        "GENERATORS": "1",
        "TRAINERS": "1",
        "GENERATOR_THREADS": str(threads),
        "TRAINER_THREADS": str(threads),
        "OFFBEAT_PUBLISH": f"127.0.0.1:{port}",
    }


def _container(description: dict[str, dict[str, object]]) -> Container:
    state, config = description["State"], description["Config"]
    labels, health = config["Labels"], state.get("Health")
    assert isinstance(labels, dict)
    return Container(
        id=str(description["Id"]),
        service=labels["com.docker.compose.service"],
        status=str(state["Status"]),
        health=str(health["Status"]) if isinstance(health, dict) else None,
        restarts=int(str(description["RestartCount"])),
        exit_code=int(str(state["ExitCode"])),
    )
