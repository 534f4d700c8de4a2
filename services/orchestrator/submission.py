"""How a run comes to be: whose it is, what it may start from, and that it is made once a key."""

from dataclasses import dataclass
from hashlib import sha256

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from offbeat.contracts.data_sources import JsonlData, ParquetData
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus
from offbeat.errors import ConflictError, InvalidRequestError
from offbeat.objects import split_s3_uri
from services.orchestrator.access import Caller, check_run
from services.orchestrator.quotas import check_quotas
from services.orchestrator.schema import RunRow
from services.orchestrator.store import Store, add_event, new_id

RUNS_FOLDER = "runs"
"""Below it lies what runs have written, see `offbeat/keys.py`."""


@dataclass(frozen=True, kw_only=True)
class Created:
    """A run, and whether this request made it."""

    run_id: str
    is_new: bool


def create_run(
    store: Store, caller: Caller, spec: RunSpec, idempotency_key: str | None, now: float
) -> Created:
    """Add a queued run to the caller's project. The same key with the same spec gives the first run
    again."""
    body = spec.model_dump_json()
    key = stored_key(caller.project_id, idempotency_key) if idempotency_key is not None else None
    try:
        with store.write() as session:
            found = _find_by_key(session, key, body)
            if found:
                return found
            row = RunRow(
                id=new_id("run"),
                project_id=caller.project_id,
                idempotency_key=key,
                spec=body,
                status=RunStatus.QUEUED,
                created_at=now,
            )
            session.add(row)
            session.flush()
            check_quotas(session, caller.project_id)
            add_event(session, row.id, now, "run_created", f"Run {spec.name!r} was created.")
            return Created(run_id=row.id, is_new=True)
    except IntegrityError:
        # On PostgreSQL two requests with one key may both have looked before either wrote.
        with store.read() as session:
            found = _find_by_key(session, key, body)
        if found is None:
            raise
        return found


def check_sources(session: Session, caller: Caller, spec: RunSpec, own_bucket: str) -> None:
    """Raise `NotFoundError` where the spec would read what a run of another project has written."""
    source = spec.init_from
    if source is not None and not source.startswith("s3://"):
        check_run(session, caller, source.rpartition("@")[0] or source)
    data_uri = spec.data.uri if isinstance(spec.data, JsonlData | ParquetData) else ""
    for uri in (source or "", spec.model.id, data_uri):
        if uri.startswith("s3://"):
            _check_object(session, caller, uri, own_bucket)


def stored_key(project_id: str, idempotency_key: str) -> str:
    """The `Idempotency-Key` as it is stored: two projects may use the same one."""
    return sha256(f"{project_id}\n{idempotency_key}".encode()).hexdigest()


def _check_object(session: Session, caller: Caller, uri: str, own_bucket: str) -> None:
    try:
        bucket, key = split_s3_uri(uri)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    folder, *rest = key.split("/")
    if bucket != own_bucket or caller.is_admin:
        return
    # A store that keeps keys as paths would follow these to another run.
    if {"", ".", ".."} & {folder, *rest[:-1]}:
        raise InvalidRequestError(f"{uri!r} has an empty, `.` or `..` part: write the key out")
    if folder == RUNS_FOLDER:
        check_run(session, caller, rest[0] if rest else "")


def _find_by_key(session: Session, key: str | None, spec: str) -> Created | None:
    if key is None:
        return None
    row = session.scalar(select(RunRow).where(RunRow.idempotency_key == key))
    if row is None:
        return None
    if row.spec != spec:
        raise ConflictError(
            "this Idempotency-Key was used with another spec; send a new key for a new run"
        )
    return Created(run_id=row.id, is_new=False)
