"""Reads the history of a run: both databases, and the bytes in the store."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from offbeat import keys
from offbeat.contracts.jobs import JobKind, JobStatus, TrainInput
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Manifest, PublishedVersion
from offbeat.errors import ObjectNotFoundError
from offbeat.objects import ObjectStore
from offbeat.tables import decode_rollouts
from scripts.chaos.fleet import Fleet
from scripts.chaos.history import (
    EventRecord,
    GroupRecord,
    History,
    SampleRecord,
    StoredFile,
    TrainRecord,
    VersionRecord,
)
from services.orchestrator.groups import group_id
from services.orchestrator.jobs import INPUT, OPEN_JOBS
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import EventRow, GroupRow, JobRow, RunRow
from services.orchestrator.store import Store, find_run
from services.weight_proxy.registry import Registry


def collect(fleet: Fleet, run_id: str) -> History:
    """The history of a run, past all relays."""
    environment = fleet.stack.environment()
    store = Store.connect(environment["OFFBEAT_ORCHESTRATOR_DATABASE_URL"])
    registry = Registry.connect(environment["OFFBEAT_WEIGHT_PROXY_DATABASE_URL"])
    try:
        published = registry.page(run_id, after=-1, limit=10_000).data
        with store.read() as session:
            return _read(session, find_run(session, run_id), published, fleet.objects)
    finally:
        registry.close()
        store.engine.dispose()


def _read(
    session: Session, run: RunRow, published: Sequence[PublishedVersion], objects: ObjectStore
) -> History:
    spec = RunSpec.model_validate_json(run.spec)
    jobs = session.scalars(select(JobRow).where(JobRow.run_id == run.id)).all()
    groups = session.scalars(
        select(GroupRow).where(GroupRow.run_id == run.id).order_by(GroupRow.index)
    ).all()
    events = session.scalars(
        select(EventRow).where(EventRow.run_id == run.id).order_by(EventRow.id)
    ).all()
    samples = _samples(groups, objects)
    return History(
        status=run.status,
        status_reason=run.status_reason,
        steps=spec.train.steps,
        max_versions=spec.staleness.max_versions,
        group_size=spec.rollout.group_size,
        version=run.version,
        num_groups=run.next_group,
        versions=[_version(each, objects) for each in published],
        groups=[_group(row, samples) for row in groups],
        trained=[
            _trained(job)
            for job in jobs
            if job.kind is JobKind.TRAIN and job.status is JobStatus.DONE
        ],
        open_job_ids=[job.id for job in jobs if job.status in OPEN_JOBS],
        jobs_redone=sum(job.attempt - 1 for job in jobs),
        events=[_event(row) for row in events],
    )


def _version(published: PublishedVersion, objects: ObjectStore) -> VersionRecord:
    manifest = published.manifest
    copy = _get(objects, keys.manifest(manifest.run_id, manifest.version))
    return VersionRecord(
        version=manifest.version,
        parent=manifest.parent,
        prefix=manifest.prefix,
        adapter_sha256=manifest.adapter_sha256,
        files=[_file(manifest, entry.name, objects) for entry in manifest.files],
        published_at=published.published_at.timestamp(),
        is_in_store=copy is not None
        and PublishedVersion.model_validate_json(copy).manifest == manifest,
    )


def _file(manifest: Manifest, name: str, objects: ObjectStore) -> StoredFile:
    entry = manifest.file(name)
    body = _get(objects, keys.version_file(manifest, name))
    return StoredFile(
        name=name,
        sha256=entry.sha256,
        size_bytes=entry.size_bytes,
        stored_sha256=None if body is None else hashlib.sha256(body).hexdigest(),
        stored_size_bytes=None if body is None else len(body),
    )


def _samples(
    groups: Sequence[GroupRow], objects: ObjectStore
) -> Mapping[str, Mapping[str, Sequence[Rollout]]]:
    """The samples of all trained groups, by object and group."""
    found: dict[str, dict[str, list[Rollout]]] = {}
    trained = [row for row in groups if row.status is GroupStatus.TRAINED]
    for key in {row.rollouts_key for row in trained if row.rollouts_key}:
        body = _get(objects, key)
        by_group = found.setdefault(key, {})
        for sample in decode_rollouts(body) if body else ():
            by_group.setdefault(sample.group_id, []).append(sample)
    return found


def _group(row: GroupRow, samples: Mapping[str, Mapping[str, Sequence[Rollout]]]) -> GroupRecord:
    name = group_id(row.index)
    own = samples.get(row.rollouts_key or "", {}).get(name, ())
    return GroupRecord(
        index=row.index,
        group_id=name,
        status=row.status,
        policy_version=row.policy_version,
        adapter_sha256=row.adapter_sha256,
        trained_step=row.trained_step,
        samples=[
            SampleRecord(policy_version=sample.policy_version, adapter_sha256=sample.adapter_sha256)
            for sample in own
        ],
    )


def _trained(job: JobRow) -> TrainRecord:
    step = INPUT.validate_json(job.input)
    assert isinstance(step, TrainInput)
    return TrainRecord(
        job_id=job.id,
        version=step.base_version + 1,
        group_ids=[group.group_id for group in step.groups],
    )


def _event(row: EventRow) -> EventRecord:
    data = json.loads(row.data)
    return EventRecord(
        kind=row.kind, version=data.get("version"), group_ids=data.get("group_ids", ())
    )


def _get(objects: ObjectStore, key: str) -> bytes | None:
    try:
        return objects.get(key)
    except ObjectNotFoundError:
        return None
