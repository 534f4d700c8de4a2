"""Where a process is: addresses, secrets, limits of the machine. What to do comes with each job.

Every setting is an environment variable `OFFBEAT_<NAME>`. A service composes the classes below in
its own `settings.py`, reads the environment once in `__main__` and passes values down.
"""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class EnvironmentSettings(BaseSettings):
    """Base of every settings class: `OFFBEAT_` variables, `_FILE` secrets through `secrets_dir`."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="OFFBEAT_", frozen=True, extra="ignore"
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


class QueueSettings(EnvironmentSettings):
    """The Celery broker."""

    redis_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    visibility_timeout_s: Annotated[int, Field(ge=5)] = 3600
    """After this long the broker hands an unacknowledged message to a second worker, whose lease is
    then refused: it decides how soon a message is seen again, never whether a result is stored
    twice."""


class ServerSettings(EnvironmentSettings):
    """An HTTP service."""

    host: str = "127.0.0.1"
    worker_token: SecretStr | None = None
    """Bearer token of workers; without it the service listens on loopback only."""


class WorkerSettings(LogSettings):
    """What generators and trainers share."""

    orchestrator_url: str = "http://127.0.0.1:8000"
    weight_proxy_url: str = "http://127.0.0.1:8001"
    worker_token: SecretStr | None = None
    pool: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "default"
    worker_id: str | None = None
    """A stable name; made from role, host and process where none is given."""
    data_dir: Path = Path(".offbeat/worker")
    """Scratch space of this worker alone: pulled adapters. Losing it costs a download."""
    model_cache_dir: Path = Path(".offbeat/models")
    """Base models; workers on one machine may share it."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
