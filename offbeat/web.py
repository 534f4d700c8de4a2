"""What both HTTP services share: problem documents, bearer tokens, request ids.

Errors are RFC 9457 `application/problem+json` with a stable `type`; the detail says how to mend the
request. Nothing in an answer ever repeats a secret.
"""

import hmac
from ipaddress import ip_address, ip_network
from uuid import uuid4

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offbeat.contracts.runs import Problem, ProblemField
from offbeat.errors import OffbeatError, UnauthorizedError

log = structlog.get_logger(__name__)

PROBLEM_TYPE_BASE = "https://offbeat.dev/problems/"
PROBLEM_FIELDS_MAX = 50
PROBLEM: dict[str, object] = {
    "model": Problem,
    "content": {"application/problem+json": {}},
    "description": "What is wrong, and how to mend it",
}
PROBLEMS: dict[int | str, dict[str, object]] = {"4XX": PROBLEM, 503: PROBLEM}
"""For the OpenAPI document: how every route may refuse."""


def problem_response(problem: Problem, *, retry_after_s: int | None = None) -> JSONResponse:
    """Render a problem document; permanent conflicts tell OpenAI-style clients not to retry.

    It is never cached: what is absent now may be there at the next poll.
    """
    headers = {"cache-control": "no-store"}
    if problem.status == 401:
        headers["www-authenticate"] = "Bearer"
    if problem.status == 409:
        headers["x-should-retry"] = "false"
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return JSONResponse(
        problem.model_dump(),
        status_code=problem.status,
        media_type="application/problem+json",
        headers=headers,
    )


def install_errors(app: FastAPI) -> None:
    """Turn every exception of a route into a problem document."""
    app.add_exception_handler(OffbeatError, _on_offbeat_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


def bearer(request: Request) -> str:
    """What stands after `Bearer` in the request's `Authorization`; empty where nothing does."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def address_of(request: Request) -> str:
    """Where the request comes from: an IPv4 address, or the /64 network that an IPv6 client has
    for itself."""
    host = request.client.host if request.client else ""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ip_network((address, 64), strict=False))


def is_token(given: str, expected: SecretStr) -> bool:
    """Compare in a time that tells nothing about the token."""
    return hmac.compare_digest(given.encode(), expected.get_secret_value().encode())


def require_token(request: Request, expected: SecretStr | None) -> None:
    """Raise `UnauthorizedError` unless the request bears the token; without one all may pass."""
    if expected is not None and not is_token(bearer(request), expected):
        raise UnauthorizedError("send a valid key as `Authorization: Bearer <key>`")


def bind_host(host: str, *, has_keys: bool) -> str:
    """The address to listen on: without a key only this machine may connect."""
    if has_keys or host in ("127.0.0.1", "localhost", "::1"):
        return host
    log.warning("No key is configured, so the service listens on loopback only.", asked_for=host)
    return "127.0.0.1"


class RequestId:
    """ASGI middleware: one id a request, in its logs and in its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take the client's id, or make one."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        identity = Headers(scope=scope).get("x-request-id", "")[:64] or uuid4().hex

        async def identified(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=identity):
            await self.app(scope, receive, identified)


def field_problems(error: RequestValidationError) -> tuple[ProblemField, ...]:
    """Pydantic's mistakes as `section.field: what is wrong`, without the offending input."""
    return tuple(
        ProblemField(field=".".join(str(part) for part in item["loc"]), message=item["msg"])
        for item in error.errors()[:PROBLEM_FIELDS_MAX]
    )


async def _on_offbeat_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OffbeatError)
    if error.status >= 500:
        log.error("A request failed.", path=request.url.path, error=error.detail)
    return problem_response(
        Problem(
            type=PROBLEM_TYPE_BASE + error.slug,
            title=error.title,
            status=error.status,
            detail=error.detail,
            errors=getattr(error, "fields", ()),
        ),
        retry_after_s=getattr(error, "retry_after_s", None),
    )


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fields = field_problems(error)
    return problem_response(
        Problem(
            type=PROBLEM_TYPE_BASE + "invalid-request",
            title="The request is not valid",
            status=422,
            detail="; ".join(f"{item.field}: {item.message}" for item in fields)[:4000],
            errors=fields,
        )
    )


async def _on_http_exception(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    response = problem_response(
        Problem(
            type="about:blank",
            title=str(error.detail),
            status=error.status_code,
            detail=str(error.detail),
        )
    )
    response.headers.update(error.headers or {})
    return response


async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    log.error("A request failed unexpectedly.", path=request.url.path, exc_info=error)
    return problem_response(
        Problem(
            type=PROBLEM_TYPE_BASE + "internal",
            title="Internal error",
            status=500,
            detail="The service failed; its log has the reason under this request's id.",
        )
    )
