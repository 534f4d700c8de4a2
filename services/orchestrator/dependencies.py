"""What every route of the orchestrator may use, and who may call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from pydantic import SecretStr

from offbeat.objects import S3ObjectStore
from offbeat.web import require_token
from services.orchestrator.broker import Broker
from services.orchestrator.scheduler import Scheduler
from services.orchestrator.store import Store


@dataclass(frozen=True, kw_only=True)
class Services:
    """Built once, in the composition root."""

    store: Store
    objects: S3ObjectStore
    broker: Broker
    scheduler: Scheduler
    clock: Callable[[], float]
    api_key: SecretStr | None
    worker_token: SecretStr | None
    lease_s: float
    heartbeat_interval_s: float


def _services(request: Request) -> Services:
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(_services)]


def user(request: Request, services: ServicesDep) -> None:
    """Let the bearer of the API key pass."""
    require_token(request, services.api_key)


def worker(request: Request, services: ServicesDep) -> None:
    """Let the bearer of the worker token pass."""
    require_token(request, services.worker_token)
