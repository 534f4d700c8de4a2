"""What every route of the orchestrator may use, and who may call it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from pydantic import SecretStr

from offbeat.chat_channel import ChatListener
from offbeat.contracts.connection import Connection
from offbeat.contracts.leases import HeartbeatReply
from offbeat.errors import ForbiddenError, UnauthorizedError
from offbeat.objects import S3ObjectStore
from offbeat.strict_routes import StrictRoute
from offbeat.web import address_of, bearer, is_token, require_token
from services.orchestrator.access import ADMIN, Caller, check_run, find_caller
from services.orchestrator.batches import Batches
from services.orchestrator.broker import Broker
from services.orchestrator.collector import Collector
from services.orchestrator.heartbeats import Heartbeat
from services.orchestrator.live_streams import LiveStreams
from services.orchestrator.rates import RateLimiter
from services.orchestrator.reports import Report
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
    connection: Connection
    """What workers are told at their start."""
    lease_s: float
    heartbeat_interval_s: float
    streams: LiveStreams = field(default_factory=LiveStreams)
    reports: Batches[Report, bool] = field(default_factory=Batches[Report, bool])
    heartbeats: Batches[Heartbeat, HeartbeatReply] = field(
        default_factory=Batches[Heartbeat, HeartbeatReply]
    )


async def services_of(request: Request) -> Services:
    """The services. A coroutine: FastAPI calls a plain function in a thread, for each request."""
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(services_of)]


KEY = HTTPBearer(
    scheme_name="key",
    auto_error=False,
    description="The administrator's key, or one of a project. None is needed where none is set.",
)


class UserRoute(StrictRoute):
    """Lets the bearer of an API key pass, where the path names no run of another project."""

    async def admit(self, request: Request) -> None:
        """Find out who calls; nothing is read for somebody unknown."""
        services = await services_of(request)
        if services.api_key is None:
            request.state.caller = ADMIN
        else:
            request.state.caller = await run_sync(_user, request, services, services.api_key)


class WorkerRoute(StrictRoute):
    """Lets the bearer of the worker token pass."""

    async def admit(self, request: Request) -> None:
        """Compare the token."""
        services = await services_of(request)
        try:
            require_token(request, services.worker_token)
        except UnauthorizedError:
            await run_sync(services.rates.check_stranger, address_of(request))
            raise


async def user(request: Request, _: Annotated[object, Security(KEY)]) -> Caller:
    """The bearer of an API key, whom the route has let pass."""
    return request.state.caller


def _user(request: Request, services: Services, admin_key: SecretStr) -> Caller:
    try:
        caller = _caller(bearer(request), services, admin_key)
    except UnauthorizedError:
        services.rates.check_stranger(address_of(request))
        raise
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
