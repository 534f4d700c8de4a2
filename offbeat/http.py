"""HTTP between Offbeat's processes: retries with a bound, problem documents as errors."""

import re
import ssl
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import SecretStr, ValidationError
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from offbeat.contracts.completions import ErrorEnvelope
from offbeat.errors import (
    ConflictError,
    ForbiddenError,
    GoneError,
    HeldBackError,
    IntegrityError,
    InvalidRequestError,
    LeaseLostError,
    NotFoundError,
    OffbeatError,
    OutageError,
    QuotaExceededError,
    RateLimitedError,
    UnauthorizedError,
    UnavailableError,
)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
CONNECTIONS_MAX, CONNECTIONS_KEPT_MAX = 100, 20
"""As httpx has them."""
UNUSED_MAX_S = 15.0
"""Of a connection: longer than a worker pauses, and half as long as a service keeps it."""
RETRY_WAIT_MAX_S = 5.0
DETAIL_CHARS_MAX = 2000
_KEY = re.compile(r"[!-~]+")
_GROWING_PAUSE = wait_exponential_jitter(multiplier=0.1, max=RETRY_WAIT_MAX_S)

_ERRORS: dict[str, type[OffbeatError]] = {
    error.slug: error
    for error in (
        ConflictError,
        ForbiddenError,
        GoneError,
        IntegrityError,
        InvalidRequestError,
        LeaseLostError,
        NotFoundError,
        OutageError,
        QuotaExceededError,
        UnauthorizedError,
        UnavailableError,
    )
}
_ERRORS_BY_STATUS: dict[int, type[OffbeatError]] = {
    400: InvalidRequestError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    410: GoneError,
    409: ConflictError,
    422: InvalidRequestError,
    # Of whatever stands in front of a service that is away.
    502: OutageError,
    503: OutageError,
    504: OutageError,
}


class ServiceClient:
    """A base URL, a bearer token, and calls that outlive a restart of the other side."""

    def __init__(
        self,
        base_url: str,
        token: SecretStr | None = None,
        *,
        ca_file: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`ca_file` is a PEM file of an authority to trust beside the machine's own."""
        if httpx.URL(base_url).userinfo:
            raise InvalidRequestError("leave user and password out of the address: send a key")
        headers = {"authorization": _authorization(token)} if token else {}
        self.http = httpx.Client(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX,
                max_keepalive_connections=CONNECTIONS_KEPT_MAX,
                keepalive_expiry=UNUSED_MAX_S,
            ),
            verify=_trust(ca_file),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        retry_for_s: float = 0.0,
        **request: Any,  # noqa: ANN401 - httpx's own keywords
    ) -> httpx.Response:
        """Send a request; raise the error that the problem document names.

        While the service cannot be reached or answers 5xx, the call is repeated with growing pauses
        until `retry_for_s` has passed; the last error is then raised.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            wait=_pause_s,
            stop=stop_after_delay(retry_for_s),
            reraise=True,
        )
        return retrying(self._send, method, path, **request)

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:  # noqa: ANN401
        try:
            response = self.http.request(method, path, **request)
        except httpx.TransportError as error:
            raise OutageError(f"{self.http.base_url} does not answer: {error!r}") from error
        raise_for_problem(response)
        return response


def _openai_message(response: httpx.Response) -> str | None:
    """What an error of the OpenAI-compatible routes says."""
    try:
        return ErrorEnvelope.model_validate_json(response.content).error.message
    except ValidationError:
        return None


def _authorization(token: SecretStr) -> str:
    secret = token.get_secret_value()
    if not _KEY.fullmatch(secret):
        # The HTTP library would refuse the header with a message that repeats it.
        raise InvalidRequestError("the key has a space, a line break or the like: copy it again")
    return f"Bearer {secret}"


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise InvalidRequestError(f"{ca_file} has no certificate: {error}") from error
    return context


def _pause_s(attempts: RetryCallState) -> float:
    """Growing pauses, and never less than the service asks for."""
    error = attempts.outcome.exception() if attempts.outcome else None
    asked_s = error.retry_after_s if isinstance(error, RateLimitedError) else 0
    return max(_GROWING_PAUSE(attempts), asked_s)


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error of the tree that an answer of 400 or more stands for."""
    if response.status_code < 400:
        return
    slug, detail = "", response.text[:DETAIL_CHARS_MAX]
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        problem = response.json()
        slug = str(problem.get("type", "")).rpartition("/")[2]
        detail = str(problem.get("detail", detail))[:DETAIL_CHARS_MAX]
    else:
        detail = _openai_message(response) or detail
    if slug == HeldBackError.slug:
        raise HeldBackError(detail, int(response.headers["retry-after"]))
    if response.status_code == 429:
        asked = response.headers.get("retry-after", "")
        raise RateLimitedError(detail, int(asked) if asked.isdecimal() else 1)
    by_status = _ERRORS_BY_STATUS.get(
        response.status_code, UnavailableError if response.status_code >= 500 else OffbeatError
    )
    raise _ERRORS.get(slug, by_status)(detail or f"HTTP {response.status_code}")
