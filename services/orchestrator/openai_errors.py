"""Errors in OpenAI's envelope, so that its clients raise what their users know."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from offbeat.contracts.completions import CompletionError, ErrorEnvelope
from offbeat.errors import OffbeatError
from offbeat.web import field_problems
from services.orchestrator.dependencies import UserRoute

MISTAKE = "invalid_request_error"
_TYPES = {401: MISTAKE, 403: "permission_error", 404: MISTAKE, 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class OpenAIRoute(UserRoute):
    """A route whose errors are OpenAI's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler with its errors translated."""
        handle = super().get_route_handler()

        async def translated(request: Request) -> Response:
            try:
                return await handle(request)
            except OffbeatError as error:
                return error_response(error)
            except RequestValidationError as error:
                return mistake_response(error)
            except HTTPException as error:
                return _response(error.status_code, str(error.detail), MISTAKE)

        return translated


def envelope(error: OffbeatError) -> ErrorEnvelope:
    """What a client is told of an error."""
    status = _status(error)
    kind = _TYPES.get(status, "server_error" if status >= 500 else MISTAKE)
    return ErrorEnvelope(
        error=CompletionError(
            message=error.detail,
            type=kind,
            param="model" if status == 404 else None,
            code=_CODES.get(status, error.slug),
        )
    )


def error_response(error: OffbeatError) -> JSONResponse:
    """The answer to a request that failed.

    A stock client tries 429 and 5xx again by itself. What a person has to mend first, such as a
    pool without a generator, it is told to show at once.
    """
    status = _status(error)
    headers = {"x-should-retry": "false"} if status >= 500 else {}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return JSONResponse(envelope(error).model_dump(), status_code=status, headers=headers)


def mistake_response(error: RequestValidationError) -> JSONResponse:
    """The answer to a body that does not have the expected form: the first mistake."""
    first = field_problems(error)[0]
    param = first.field.removeprefix("body").removeprefix(".") or None
    message = first.message.removeprefix("Value error, ")
    message = f"{param}: {message}" if param else message
    return _response(400, message, MISTAKE, param)


def _status(error: OffbeatError) -> int:
    return 400 if error.status == 422 else error.status


def _response(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    error = CompletionError(message=message, type=kind, param=param)
    return JSONResponse(ErrorEnvelope(error=error).model_dump(), status_code=status)
