"""What every route of the orchestrator may use, and who may call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from pydantic import SecretStr

from offbeat.chat_channel import ChatListener
from offbeat.errors import ForbiddenError, UnauthorizedError
from offbeat.objects import S3ObjectStore
from offbeat.web import bearer, is_token, require_token
from services.orchestrator.access import ADMIN, Caller, check_run, find_caller
from services.orchestrator.broker import Broker
from services.orchestrator.collector import Collector
from services.orchestrator.rates import RateLimiter
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
    """The admin key; without it everybody who can connect is the administrator."""
    worker_token: SecretStr | None
    rates: RateLimiter
    chats: ChatListener
    collector: Collector
    lease_s: float
    heartbeat_interval_s: float


def _services(request: Request) -> Services:
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(_services)]


def user(request: Request, services: ServicesDep) -> Caller:
    """Let the bearer of an API key pass, where the path names no run of another project."""
    if services.api_key is None:
        return ADMIN
    caller = _caller(bearer(request), services, services.api_key)
    services.rates.check(caller.key_id)
    run_id = request.path_params.get("run_id")
    if run_id is not None and not caller.is_admin:
        with services.store.read() as session:
            check_run(session, caller, run_id)
    return caller


def _caller(secret: str, services: Services, admin_key: SecretStr) -> Caller:
    if is_token(secret, admin_key):
        return ADMIN
    with services.store.read() as session:
        caller = find_caller(session, secret)
    if caller is None:
        raise UnauthorizedError("send a valid key as `Authorization: Bearer <key>`")
    return caller


CallerDep = Annotated[Caller, Depends(user)]


def admin(caller: CallerDep) -> None:
    """Let the bearer of the admin key pass."""
    if not caller.is_admin:
        raise ForbiddenError("this takes the admin key, not a project's")


def worker(request: Request, services: ServicesDep) -> None:
    """Let the bearer of the worker token pass."""
    require_token(request, services.worker_token)
