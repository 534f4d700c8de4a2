"""Where the orchestrator is, and how patient it is."""

from typing import Annotated, Self

from limits import parse
from pydantic import AfterValidator, Field, FilePath, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from offbeat.settings import EnvironmentSettings, LogSettings, ServerSettings, Token


def _checked_rate(rate: str) -> str:
    parse(rate)
    return rate


class OrchestratorSettings(LogSettings, ServerSettings):
    """`OFFBEAT_*` variables of the orchestrator; object store and queue have classes of their
    own."""

    orchestrator_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """The port to listen on."""
    orchestrator_database_url: SecretStr = SecretStr("sqlite:///.offbeat/orchestrator.db")
    """SQLite by default; `postgresql+psycopg://…` on clusters."""
    api_key: Token | None = None
    """The admin key: it makes projects and their keys, and sees all runs. Without it no key is
    needed, and the service listens on loopback only."""
    rate_limit: Annotated[str, AfterValidator(_checked_rate)] = "6000/minute"
    """Requests that one key may send; a dozen watchers and a script stay far below."""
    rate_limit_storage_url: SecretStr = SecretStr("memory://")
    """Where they are counted: `memory://` by each replica for itself, or a Redis for all."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """A worker that is silent for so long has lost its job. It bounds the cost of a killed
    worker."""
    heartbeat_interval_s: Annotated[float, Field(gt=0)] = 5.0
    """How often a worker says that it is at its job: several times in a lease."""
    message_lost_s: Annotated[float, Field(gt=0)] = 15.0
    """A message that was sent so long ago, was never leased and is not in the broker is sent
    again."""

    gc_interval_s: Annotated[float, Field(gt=0)] = 600.0
    """How often the objects of a run that goes on are looked through for what its `retention` gives
    up; those of a run that has ended, once a day."""
    weight_proxy_url: str = "http://127.0.0.1:8001"
    """Told when the versions of a deleted run may be forgotten."""
    ca_file: FilePath | None = None
    """Authorities to trust beside the machine's own when it is told, as PEM."""

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if self.api_key is not None and self.api_key == self.worker_token:
            raise ValueError("OFFBEAT_API_KEY and OFFBEAT_WORKER_TOKEN must not be the same")
        return self


class WorkersSettings(EnvironmentSettings):
    """What workers are told in place of the orchestrator's own settings (`OFFBEAT_WORKERS_*`), for
    workers outside its network, or with fewer rights."""

    model_config = SettingsConfigDict(env_prefix="OFFBEAT_WORKERS_", frozen=True, extra="ignore")

    weight_proxy_url: str | None = None
    """The weight-proxy's address as workers see it."""
    s3_endpoint_url: str | None = None
    """The object store's address as workers see it."""
    s3_access_key_id: str | None = None
    """The name of a key for workers, which may do less than the orchestrator's."""
    s3_secret_access_key: SecretStr | None = None
    """The secret of that key."""

    @model_validator(mode="after")
    def _credentials_are_whole(self) -> Self:
        if (self.s3_access_key_id is None) != (self.s3_secret_access_key is None):
            raise ValueError(
                "set OFFBEAT_WORKERS_S3_ACCESS_KEY_ID and OFFBEAT_WORKERS_S3_SECRET_ACCESS_KEY "
                "both, or neither"
            )
        return self
