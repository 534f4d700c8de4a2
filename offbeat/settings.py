"""Where a process is: addresses, secrets, limits of the machine. What to do comes with each job.

Every setting is an environment variable `OFFBEAT_<NAME>`; one that is not set there may be a file
of that name in the folder `OFFBEAT_SECRETS_DIR`. A service composes the classes below in its own
`settings.py`, reads the environment once in `__main__` and passes values down.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, FilePath, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
)

from offbeat.contracts.bounds import Name

Token = Annotated[SecretStr, Field(min_length=16)]
"""A bearer token that nobody guesses: `openssl rand -hex 32` makes one."""


SECRETS_DIR = "OFFBEAT_SECRETS_DIR"
"""Names the folder of settings that are files, as Docker and Kubernetes mount secrets: in upper or
lower case, without line break."""


class EnvironmentSettings(BaseSettings):
    """Base of every settings class: `OFFBEAT_` variables. An empty one counts as not set, and what
    is wrong is told without the values, which may be secrets."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="OFFBEAT_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment, then the files."""
        folder = os.environ.get(SECRETS_DIR)
        files = (SecretsSettingsSource(settings_cls, secrets_dir=folder),) if folder else ()
        return init_settings, env_settings, *files


class LogSettings(EnvironmentSettings):
    """How a process logs."""

    log_format: Annotated[str, Field(pattern="^(text|json)$")] = "text"
    """`text` for people, `json` for a collector."""
    log_level: Annotated[str, Field(pattern="^(DEBUG|INFO|WARNING|ERROR)$")] = "INFO"
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""


class ObjectStoreSettings(EnvironmentSettings):
    """The S3-compatible store (`OFFBEAT_S3_*`)."""

    model_config = SettingsConfigDict(env_prefix="OFFBEAT_S3_", frozen=True, extra="ignore")

    endpoint_url: str | None = None
    """None is AWS; MinIO and others need their address."""
    bucket: str = "offbeat"
    """It must exist."""
    region: str = "us-east-1"
    """Most stores but AWS take any."""
    access_key_id: str = "offbeat"
    """The key's name."""
    secret_access_key: SecretStr = SecretStr("")
    """The key's secret."""
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
    """The address to listen on: `0.0.0.0` is every one."""
    worker_token: Token | None = None
    """Bearer token of workers; without it the service listens on loopback only."""
    tls_cert_file: FilePath | None = None
    """PEM file of the service's certificate and its chain; with it the service speaks HTTPS."""
    tls_key_file: FilePath | None = None
    """PEM file of the certificate's key."""
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
    """Where the orchestrator is."""
    weight_proxy_url: str = ""
    """The orchestrator is asked for it where it is not set, and for the object store where its
    credentials are not set."""
    ca_file: FilePath | None = None
    """PEM file of the authority to trust for `https://` services, beside the machine's own."""
    worker_token: Token | None = None
    """Bearer token of workers, the same as the services'."""
    pool: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "default"
    """The worker takes jobs of the runs that name this pool."""
    worker_id: Name | None = None
    """A stable name; made from role, host and process where none is given."""
    grace_s: Annotated[float, Field(ge=0)] = 25.0
    """After SIGTERM: how long a job under way has to end before it is handed back."""
    data_dir: Path = Path(".offbeat/worker")
    """Scratch space of this worker alone: pulled adapters. Losing it costs a download. A file
    `alive` in it is written anew every few seconds."""
    model_cache_dir: Path = Path(".offbeat/models")
    """Base models; workers on one machine may share it."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
    store: ObjectStoreSettings = Field(default_factory=ObjectStoreSettings)
    queue: QueueSettings = Field(default_factory=QueueSettings)
