"""Where a process is: addresses, secrets, limits of the machine. What to do comes with each job.

Every setting is an environment variable `OFFBEAT_<NAME>`. A service composes the classes below in
its own `settings.py`, reads the environment once in `__main__` and passes values down.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, FilePath, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Token = Annotated[SecretStr, Field(min_length=16)]
"""A bearer token that nobody guesses: `openssl rand -hex 32` makes one."""


class EnvironmentSettings(BaseSettings):
    """Base of every settings class: `OFFBEAT_` variables. An empty one counts as not set, and what
    is wrong is told without the values, which may be secrets."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="OFFBEAT_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )


class LogSettings(EnvironmentSettings):
    """How a process logs."""

    log_format: Annotated[str, Field(pattern="^(text|json)$")] = "text"
    log_level: Annotated[str, Field(pattern="^(DEBUG|INFO|WARNING|ERROR)$")] = "INFO"


class ObjectStoreSettings(EnvironmentSettings):
    """The S3-compatible store (`OFFBEAT_S3_*`)."""

    model_config = SettingsConfigDict(env_prefix="OFFBEAT_S3_", frozen=True, extra="ignore")

    endpoint_url: str | None = None
    """None is AWS; MinIO and others need their address."""
    bucket: str = "offbeat"
    region: str = "us-east-1"
    access_key_id: str = "offbeat"
    secret_access_key: SecretStr = SecretStr("")
    ca_file: FilePath | None = None
    """PEM file of the authority to trust for an `https://` address, in place of the public ones."""


class QueueSettings(EnvironmentSettings):
    """The Celery broker."""

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """`rediss://` speaks TLS."""
    redis_ca_file: FilePath | None = None
    """PEM file of the authority to trust for `rediss://`, beside the machine's own."""
    visibility_timeout_s: Annotated[int, Field(ge=5)] = 3600
    """After this long the broker hands an unacknowledged message to a second worker, whose lease is
    then refused: it decides how soon a message is seen again, never whether a result is stored
    twice."""


class ServerSettings(EnvironmentSettings):
    """An HTTP service."""

    host: str = "127.0.0.1"
    worker_token: Token | None = None
    """Bearer token of workers; without it the service listens on loopback only."""
    tls_cert_file: FilePath | None = None
    """PEM file of the service's certificate and its chain; with it the service speaks HTTPS."""
    tls_key_file: FilePath | None = None
    root_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)*$")] = ""
    """The path, such as `/offbeat`, below which a reverse proxy shows the service; the proxy takes
    it away before it forwards."""
    forwarded_allow_ips: str = "127.0.0.1"
    """Addresses or networks of the proxies whose `X-Forwarded-*` is believed, with commas."""

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("set OFFBEAT_TLS_CERT_FILE and OFFBEAT_TLS_KEY_FILE both, or neither")
        return self


class WorkerSettings(LogSettings):
    """What generators and trainers share."""

    orchestrator_url: str = "http://127.0.0.1:8000"
    weight_proxy_url: str = "http://127.0.0.1:8001"
    ca_file: FilePath | None = None
    """PEM file of the authority to trust for `https://` services, beside the machine's own."""
    worker_token: Token | None = None
    pool: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "default"
    worker_id: str | None = None
    """A stable name; made from role, host and process where none is given."""
    grace_s: Annotated[float, Field(ge=0)] = 25.0
    """After SIGTERM: how long a job under way has to end before it is handed back."""
    data_dir: Path = Path(".offbeat/worker")
    """Scratch space of this worker alone: pulled adapters. Losing it costs a download."""
    model_cache_dir: Path = Path(".offbeat/models")
    """Base models; workers on one machine may share it."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
