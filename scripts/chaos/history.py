"""What is left of a run in SQL and in the store, as plain data, for the invariants."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a version: what its manifest says, and what lies under its key."""

    name: str
    sha256: str
    size_bytes: int
    stored_sha256: str | None
    """None where there is no such object."""
    stored_size_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """A row of the weight-proxy's table."""

    version: int
    parent: int | None
    prefix: str
    adapter_sha256: str
    files: Sequence[StoredFile]
    published_at: float
    """By the weight-proxy's clock, in seconds since the epoch."""
    is_in_store: bool
    """Whether the copy of the manifest in the store says the same."""


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """Where a sample in the store says that it comes from."""

    policy_version: int
    adapter_sha256: str


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """A row of the orchestrator's table of groups."""

    index: int
    group_id: str
    status: str
    policy_version: int | None
    adapter_sha256: str | None
    trained_step: int | None
    samples: Sequence[SampleRecord]
    """Of a trained group: its rows in the store."""


@dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """A train job that is done: the version that it made, from which groups."""

    job_id: str
    version: int
    group_ids: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """An entry of the run's log that says something about versions or groups."""

    kind: str
    version: int | None = None
    group_ids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class History:
    """All that is known of a run after its end."""

    status: str
    status_reason: str | None
    steps: int
    max_versions: int
    group_size: int
    version: int | None
    num_groups: int
    """Groups that were ever started: their indexes are 0 to `num_groups` - 1."""
    versions: Sequence[VersionRecord]
    groups: Sequence[GroupRecord]
    trained: Sequence[TrainRecord]
    open_job_ids: Sequence[str]
    jobs_redone: int
    """Attempts beyond the first of every job."""
    events: Sequence[EventRecord]
