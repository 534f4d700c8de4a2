"""What both HTTP services share: problem documents, body limits, bearer tokens, request ids,
health.

Errors are RFC 9457 `application/problem+json` with a stable `type`; the detail says how to mend the
request. Nothing in an answer ever repeats a secret.
"""

import hmac
from collections.abc import Awaitable, Callable
from uuid import uuid4

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offbeat.contracts.runs import Problem, ProblemField
from offbeat.errors import OffbeatError, UnauthorizedError

log = structlog.get_logger(__name__)

PROBLEM_TYPE_BASE = "https://offbeat.dev/problems/"
BODY_BYTES_MAX = 16 * 2**20
"""Largest request body: an inline data set of 1,000 rows fits, a tensor does not."""
PROBLEM_FIELDS_MAX = 50


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


async def request_id(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Middleware: one id a request, in its logs and in its answer."""
    identity = request.headers.get("x-request-id", "")[:64] or uuid4().hex
    with structlog.contextvars.bound_contextvars(request_id=identity):
        response = await call_next(request)
    response.headers["x-request-id"] = identity
    return response


class BodyLimit:
    """ASGI middleware that ends a request whose body grows past the limit, declared or not."""

    def __init__(self, app: ASGIApp, bytes_max: int = BODY_BYTES_MAX) -> None:
        self.app = app
        self.bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the body while it is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.bytes_max:
                raise HTTPException(413, f"the body is larger than {self.bytes_max} bytes")
            return message

        await self.app(scope, counted, send)


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
    return problem_response(
        Problem(
            type="about:blank",
            title=str(error.detail),
            status=error.status_code,
            detail=str(error.detail),
        )
    )


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
