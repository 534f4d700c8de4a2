"""The routes of a vLLM server that an engine needs, and what its refusals mean.

vLLM is never imported: it lives in an environment or a container of its own. The bodies are those
of vLLM 0.32. Completions have a module of their own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from offbeat.errors import IntegrityError, OffbeatError, PermanentJobError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""For what needs no engine: it comes in milliseconds, so a server that takes longer hangs."""
LOAD_TIMEOUT_S = 180.0
"""A load waits for the step under way and reads some gigabytes at most."""
MESSAGE_CHARS_MAX = 500

T = TypeVar("T", bound=BaseModel)

_MAX_LORAS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


class ModelCard(BaseModel):
    """An entry of `/v1/models`: the base model, or an adapter with a parent."""

    id: str
    root: str | None = None
    """The folder it was read from, as the server sees it."""
    parent: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    data: tuple[ModelCard, ...]


class _Version(BaseModel):
    version: str


class _ErrorInfo(BaseModel):
    message: str


class _ErrorBody(BaseModel):
    error: _ErrorInfo


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a server listens, and with which key."""

    url: str
    api_key: SecretStr | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """What each request carries."""
        if self.api_key is None:
            return {}
        return {"authorization": f"Bearer {self.api_key.get_secret_value()}"}


class VllmClient:
    """Every method may be called from any thread, is bounded in time, and raises
    `UnavailableError` where the server does not answer."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._http = httpx.Client(
            base_url=address.url,
            headers=address.headers,
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def is_healthy(self) -> bool:
        """Whether the server and its engine live."""
        try:
            return self._http.get("/health").status_code == HTTPStatus.OK
        except httpx.TransportError:
            return False

    def version(self) -> str:
        """vLLM's version."""
        return _parsed(_Version, self._send("GET", "/version")).version

    def models(self) -> tuple[ModelCard, ...]:
        """The base model under each of its names, and the adapters."""
        return _parsed(_Models, self._send("GET", "/v1/models")).data

    def max_loras(self) -> int | None:
        """`--max-loras`, from the metrics; None before the first request of an adapter."""
        found = _MAX_LORAS.search(self._send("GET", "/metrics").text)
        return int(found[1]) if found else None

    def load(self, name: str, folder: Path) -> None:
        """Read the PEFT folder, which the server must see under the same path."""
        body = {"lora_name": name, "lora_path": str(folder)}
        response = self._post("/v1/load_lora_adapter", body, LOAD_TIMEOUT_S)
        if response.is_error:
            raise load_refusal(response.status_code, message_of(response), folder)

    def unload(self, name: str) -> None:
        """Forget the name; one that is not known is fine, and so is a server that is gone."""
        try:
            response = self._post("/v1/unload_lora_adapter", {"lora_name": name}, ANSWER_TIMEOUT_S)
        except UnavailableError as error:
            if isinstance(error.__cause__, httpx.ConnectError):
                return
            raise
        if response.is_error and response.status_code != HTTPStatus.NOT_FOUND:
            raise UnavailableError(f"vLLM does not unload {name}: {message_of(response)}")

    def _send(self, method: str, path: str) -> httpx.Response:
        try:
            response = self._http.request(method, path)
        except httpx.TransportError as error:
            raise unreachable(self.address, error) from error
        if response.is_error:
            raise refusal(response.status_code, f"{path}: {message_of(response)}")
        return response

    def _post(self, path: str, body: Mapping[str, str], timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            return self._http.post(path, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise unreachable(self.address, error) from error


def unreachable(address: ServerAddress, error: httpx.TransportError) -> UnavailableError:
    """The server is gone, hangs, or broke off."""
    return UnavailableError(f"vLLM at {address.url} does not answer: {error!r}")


def message_of(response: httpx.Response) -> str:
    """The reason in an answer of 400 or more."""
    try:
        message = _ErrorBody.model_validate_json(response.content).error.message
    except ValidationError:
        message = response.text
    return message[:MESSAGE_CHARS_MAX] or f"HTTP {response.status_code}"


def refusal(status: int, message: str) -> OffbeatError:
    """What an error stands for on any route."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return PermanentJobError("vLLM wants its key: set OFFBEAT_VLLM_API_KEY to its --api-key")
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(f"vLLM failed: {message}")
    return PermanentJobError(f"vLLM refuses the request: {message}")


def load_refusal(status: int, message: str, folder: Path) -> OffbeatError:
    """What an error of the load route stands for, with the setting that mends it."""
    if "is greater than max_lora_rank" in message:
        return IntegrityError(f"{message}: start vLLM with a higher --max-lora-rank")
    if "LoRA is not enabled" in message:
        return PermanentJobError("vLLM has no adapters: start it with --enable-lora")
    if status == HTTPStatus.NOT_FOUND and "No adapter found" in message:
        return UnavailableError(
            f"vLLM does not see {folder}: mount OFFBEAT_DATA_DIR under the same path for both"
        )
    if status == HTTPStatus.NOT_FOUND:
        return PermanentJobError(
            "vLLM has no route to load adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if status == HTTPStatus.BAD_REQUEST:
        return IntegrityError(f"vLLM refuses the adapter: {message}")
    return refusal(status, message)


def _parsed(model: type[T], response: httpx.Response) -> T:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise PermanentJobError(f"this is no vLLM server that Offbeat knows: {error}") from error
