"""HTTP between Offbeat's processes: retries with a bound, problem documents as errors."""

from typing import Any

import httpx
from pydantic import SecretStr
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

from offbeat.errors import (
    ConflictError,
    IntegrityError,
    InvalidRequestError,
    LeaseLostError,
    NotFoundError,
    OffbeatError,
    UnauthorizedError,
    UnavailableError,
)

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
RETRY_WAIT_MAX_S = 5.0
DETAIL_CHARS_MAX = 2000

_ERRORS: dict[str, type[OffbeatError]] = {
    error.slug: error
    for error in (
        ConflictError,
        IntegrityError,
        InvalidRequestError,
        LeaseLostError,
        NotFoundError,
        UnauthorizedError,
        UnavailableError,
    )
}
_ERRORS_BY_STATUS: dict[int, type[OffbeatError]] = {
    401: UnauthorizedError,
    404: NotFoundError,
    409: ConflictError,
    422: InvalidRequestError,
}


class ServiceClient:
    """A base URL, a bearer token, and calls that outlive a restart of the other side."""

    def __init__(
        self,
        base_url: str,
        token: SecretStr | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}
        self.http = httpx.Client(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=transport,
        )

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
            wait=wait_exponential_jitter(multiplier=0.1, max=RETRY_WAIT_MAX_S),
            stop=stop_after_delay(retry_for_s),
            reraise=True,
        )
        return retrying(self._send, method, path, **request)

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:  # noqa: ANN401
        try:
            response = self.http.request(method, path, **request)
        except httpx.TransportError as error:
            raise UnavailableError(f"{self.http.base_url} does not answer: {error!r}") from error
        raise_for_problem(response)
        return response


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error of the tree that an answer of 400 or more stands for."""
    if response.status_code < 400:
        return
    slug, detail = "", response.text[:DETAIL_CHARS_MAX]
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        problem = response.json()
        slug = str(problem.get("type", "")).rpartition("/")[2]
        detail = str(problem.get("detail", detail))[:DETAIL_CHARS_MAX]
    by_status = _ERRORS_BY_STATUS.get(
        response.status_code, UnavailableError if response.status_code >= 500 else OffbeatError
    )
    raise _ERRORS.get(slug, by_status)(detail or f"HTTP {response.status_code}")
