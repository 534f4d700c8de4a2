"""Where the orchestrator is, and how patient it is."""

from typing import Annotated

from pydantic import Field, SecretStr

from offbeat.settings import LogSettings, ServerSettings


class OrchestratorSettings(LogSettings, ServerSettings):
    """`OFFBEAT_*` variables of the orchestrator; object store and queue have classes of their
    own."""

    orchestrator_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    orchestrator_database_url: SecretStr = SecretStr("sqlite:///.offbeat/orchestrator.db")
    """SQLite by default; `postgresql+psycopg://…` on clusters."""
    api_key: SecretStr | None = None
    """What users send as `Authorization: Bearer`; without it the service listens on loopback
    only."""
    lease_s: Annotated[float, Field(ge=1)] = 30.0
    """A worker that is silent for so long has lost its job. It bounds the cost of a killed
    worker."""
    heartbeat_interval_s: Annotated[float, Field(gt=0)] = 5.0
    message_lost_s: Annotated[float, Field(gt=0)] = 15.0
    """A message that was sent so long ago, was never leased and is not in the broker is sent
    again."""
