"""The manifests of a run's versions, as the jobs that published them have handed them in."""

from collections.abc import Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import InitOutput, JobKind, JobStatus, TrainOutput
from offbeat.contracts.weights import Manifest
from services.orchestrator.results import OUTPUT
from services.orchestrator.schema import JobRow


def manifests(session: Session, run_id: str) -> Iterator[Manifest]:
    """The run's published versions, newest first."""
    bodies = session.scalars(
        select(JobRow.output)
        .where(
            JobRow.run_id == run_id,
            JobRow.kind.in_([JobKind.INIT, JobKind.TRAIN]),
            JobRow.status == JobStatus.DONE,
        )
        .order_by(JobRow.seq.desc())
    )
    for body in bodies:
        output = OUTPUT.validate_json(body or "")
        assert isinstance(output, InitOutput | TrainOutput)
        yield output.manifest
