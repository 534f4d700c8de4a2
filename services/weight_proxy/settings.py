"""Where the weight-proxy listens, keeps its table and caches files (`OFFBEAT_WEIGHT_PROXY_*`)."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from offbeat.settings import (
    EnvironmentSettings,
    LogSettings,
    ObjectStoreSettings,
    ServerSettings,
)


class WeightProxySettings(EnvironmentSettings):
    """The settings of one weight-proxy process."""

    model_config = SettingsConfigDict(
        env_prefix="OFFBEAT_WEIGHT_PROXY_", frozen=True, extra="ignore"
    )

    port: Annotated[int, Field(ge=1, le=65_535)] = 8001
    """The port to listen on."""
    database_url: SecretStr = SecretStr("sqlite:///.offbeat/weight-proxy.db")
    """An SQLAlchemy URL; replicas share one PostgreSQL database."""
    cache_dir: Path = Path(".offbeat/weight-proxy-cache")
    """A folder of this process alone. Losing it costs S3 one read a file."""
    cache_bytes_max: Annotated[int, Field(ge=2**20)] = 10 * 2**30
    """Hundreds of adapters of a few MB, or a few of the largest."""
    log: LogSettings = Field(default_factory=LogSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    store: ObjectStoreSettings = Field(default_factory=ObjectStoreSettings)
