"""Who calls: the bearer of the admin key, or of a key of a project, who sees that project alone.

A key's secret is `ofb_<id>_<256 random bits>`. Only its SHA-256 is stored: what has so much entropy
cannot be guessed from a fast hash. The id in it is public; it finds the row.
"""

import hmac
import re
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_urlsafe

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.projects import DEFAULT_PROJECT
from offbeat.contracts.runs import WorkerView
from offbeat.errors import NotFoundError
from services.orchestrator.schema import JobRow, KeyRow, ProjectRow, RunRow
from services.orchestrator.store import new_id

SECRET_BYTES = 32
_SECRET = re.compile(r"ofb_([0-9a-f]{10})_[\w-]{43}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The bearer of a valid key."""

    key_id: str
    project_id: str
    """Whose its new runs are."""
    is_admin: bool = False
    """Sees the runs of all projects, and manages projects and keys."""

    def may_see(self, project_id: str) -> bool:
        """Whether what belongs to the project is there for this caller."""
        return self.is_admin or project_id == self.project_id


ADMIN = Caller(key_id="admin", project_id=DEFAULT_PROJECT, is_admin=True)


def new_key(project_id: str, name: str, now: float) -> tuple[KeyRow, str]:
    """A key of the project, and its secret, which is nowhere else."""
    key_id = new_id("key")
    secret = f"ofb_{key_id.removeprefix('key-')}_{token_urlsafe(SECRET_BYTES)}"
    row = KeyRow(
        id=key_id,
        project_id=project_id,
        name=name,
        secret_sha256=_hash(secret),
        created_at=now,
    )
    return row, secret


def find_caller(session: Session, secret: str) -> Caller | None:
    """The bearer of a project's key, or None where the secret is not one's."""
    form = _SECRET.fullmatch(secret)
    row = session.get(KeyRow, f"key-{form[1]}") if form else None
    if row is None or not hmac.compare_digest(row.secret_sha256, _hash(secret)):
        return None
    return Caller(key_id=row.id, project_id=row.project_id)


def check_run(session: Session, caller: Caller, run_id: str) -> None:
    """Raise `NotFoundError`, as for a run that never was, unless the caller may see it."""
    project_id = session.scalar(
        select(RunRow.project_id).where(RunRow.id == run_id, RunRow.deleted_at.is_(None))
    )
    if project_id is None or not caller.may_see(project_id):
        raise NotFoundError(f"there is no run {run_id!r}")


def own_part(session: Session, caller: Caller, worker: WorkerView) -> WorkerView:
    """The worker without the runs and jobs of projects that are not the caller's."""
    if caller.is_admin:
        return worker
    served = {version.run_id for version in worker.report.serving}
    own = RunRow.project_id == caller.project_id
    runs = set(session.scalars(select(RunRow.id).where(RunRow.id.in_(served), own)))
    jobs = session.scalars(
        select(JobRow.id)
        .join(RunRow, RunRow.id == JobRow.run_id)
        .where(JobRow.id.in_(worker.jobs), own)
    )
    serving = tuple(version for version in worker.report.serving if version.run_id in runs)
    report = worker.report.model_copy(update={"serving": serving})
    return worker.model_copy(update={"report": report, "jobs": tuple(jobs)})


def find_project(session: Session, caller: Caller, project_id: str) -> ProjectRow:
    """The project; `NotFoundError` where there is none that the caller may see."""
    row = session.get(ProjectRow, project_id)
    if row is None or not caller.may_see(project_id):
        raise NotFoundError(f"there is no project {project_id!r}")
    return row


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()
