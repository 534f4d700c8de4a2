"""Routes that read a request strictly, and say once in the log what they refuse.

The body is parsed here and not by FastAPI, which takes the last of two equal keys, NaN, lone
surrogates and anything of any depth.
"""

from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any

import structlog
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from offbeat.contracts.runs import ProblemField
from offbeat.errors import InvalidRequestError, OffbeatError
from offbeat.plain_json import TOO_DEEP, TOO_LARGE, has_many_values, odd_values, parse_json
from offbeat.spec_problems import PROBLEMS_MAX, problem_lines
from offbeat.web import field_problems

log = structlog.get_logger(__name__)

LOGGED_STATUSES = frozenset({400, 401, 408, 413, 422})
"""Bad input. Not 404 and 409, which are part of how workers and readers ask, and not 429, whose
purpose is to cost little."""
LOGGED_CHARS_MAX = 500
"""Of a path and of a reason."""
CLIENT_CLOSED = 499
"""nginx's word for a request whose client did not wait; nobody reads it."""
IN_PLACE_BYTES_MAX = 64 * 2**10
"""A larger body is parsed in a thread: it would keep all other requests waiting."""


class InvalidBodyError(InvalidRequestError):
    """The body has values that cannot be kept; `fields` says where and why."""

    def __init__(self, fields: tuple[ProblemField, ...]) -> None:
        super().__init__("; ".join(problem_lines(fields)))
        self.fields = fields


class StrictRequest(Request):
    """A request whose JSON was read by `read_body`."""

    async def json(self) -> object:
        """The parsed body. Raises `InvalidRequestError`."""
        if not hasattr(self, "_json"):
            body = await self.body()
            small = len(body) <= IN_PLACE_BYTES_MAX
            self._json = read_body(body) if small else await run_sync(read_body, body)
        return self._json


class StrictRoute(APIRoute):
    """Checks address, caller and body before FastAPI sees them."""

    async def admit(self, request: Request) -> None:
        """Raise unless the caller may ask at all: before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the checks."""
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            request = StrictRequest(request.scope, request.receive)
            try:
                check_address(request)
                await self.admit(request)
                if self.body_field is not None and _is_json(request) and await request.body():
                    await request.json()
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED)
            except OffbeatError as error:
                _log_refusal(request, error.status, error.detail)
                raise
            except RequestValidationError as error:
                _log_refusal(request, 422, "; ".join(problem_lines(field_problems(error))))
                raise
            except HTTPException as error:
                _log_refusal(request, error.status_code, str(error.detail))
                raise

        return strict


def check_address(request: Request) -> None:
    """Raise `InvalidRequestError` for a NUL character in path or query, which no database takes."""
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"]:
        raise InvalidRequestError("the address has a NUL character: leave `%00` out")


def read_body(body: bytes) -> object:
    """The JSON value. `InvalidRequestError` says what is wrong with it."""
    try:
        text = body.decode()
        if has_many_values(text):
            raise InvalidRequestError(f"the body {TOO_LARGE}")
        value = parse_json(text)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise InvalidRequestError(f"the body is {TOO_DEEP}") from error
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    odd = tuple(islice(odd_values(value), PROBLEMS_MAX))
    if odd:
        raise InvalidBodyError(odd)
    return value


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _log_refusal(request: Request, status: int, reason: str) -> None:
    if status in LOGGED_STATUSES:
        log.info(
            "A request was refused.",
            method=request.method,
            path=request.scope["raw_path"].decode("ascii", "replace")[:LOGGED_CHARS_MAX],
            status=status,
            reason=reason[:LOGGED_CHARS_MAX],
        )
