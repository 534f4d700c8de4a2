"""Projects, their quotas and their API keys, as an administrator reads and writes them."""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from offbeat.contracts.base import Contract

ProjectId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
KeyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,63}$")]

DEFAULT_PROJECT = "default"
"""Whose runs are those that the admin key submits, and all runs where no key is configured."""
COUNT_MAX = 2**31 - 1
BYTES_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact."""


class Quotas(Contract):
    """What a project may use at once. The defaults are beyond what one person starts by hand."""

    active_runs_max: Annotated[int, Field(ge=0, le=COUNT_MAX)] = 1_000
    """Runs that are queued, running or paused."""
    jobs_in_flight_max: Annotated[int, Field(ge=0, le=COUNT_MAX)] = 10_000
    """Jobs that wait in the broker or are with a worker; the project's others wait in SQL."""
    stored_bytes_max: Annotated[int, Field(ge=0, le=BYTES_MAX)] = 10 * 2**40
    """Bytes of prompts, rollouts and versions in the object store."""


class ProjectUse(Contract):
    """What a project uses now."""

    active_runs: int
    jobs_in_flight: int
    stored_bytes: int


class ProjectRequest(Contract):
    """`POST /v1/projects`."""

    id: ProjectId
    quotas: Quotas = Quotas()


class ProjectView(Contract):
    """A project as `GET /v1/projects/{id}` shows it."""

    id: str
    created_at: datetime
    quotas: Quotas
    use: ProjectUse


class KeyRequest(Contract):
    """`POST /v1/projects/{id}/keys`."""

    name: KeyName


class KeyView(Contract):
    """A key without its secret, which nobody can read again."""

    id: str
    """Stands in the secret too, so that a key that is found somewhere can be told and deleted."""
    project_id: str
    name: str
    created_at: datetime


class NewKey(Contract):
    """A key that was just made: the only time that its secret is shown."""

    key: KeyView
    secret: str
