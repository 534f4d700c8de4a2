"""What a run has written, read back from the store: samples as people read them, adapters as a
zip."""

import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import FileResponse
from pydantic import StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.background import BackgroundTask

from offbeat import keys
from offbeat.contracts.jobs import (
    EvaluateOutput,
    GenerateOutput,
    JobKind,
    JobStatus,
)
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.runs import Page, RolloutView
from offbeat.contracts.weights import ADAPTER_FILES, Manifest
from offbeat.errors import NotFoundError
from offbeat.objects import S3ObjectStore
from offbeat.tables import decode_rollouts
from services.orchestrator.dependencies import Services, ServicesDep, UserRoute, user
from services.orchestrator.groups import group_index
from services.orchestrator.published import manifests
from services.orchestrator.remains import check_adapter
from services.orchestrator.results import OUTPUT
from services.orchestrator.schema import SEQ_MAX, GroupRow, JobRow
from services.orchestrator.store import find_run

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])

OBJECTS_PER_REQUEST = 16
"""Rollout objects read for one page; where a filter leaves the page short, `has_more` says so."""

Cursor = Annotated[str, StringConstraints(pattern=r"^\d{1,12}\.\d{1,9}$")]


@router.get("/runs/{run_id}/rollouts")
def rollouts(
    services: ServicesDep,
    run_id: str,
    split: Literal["train", "eval"] = "train",
    step: Annotated[int | None, Query(ge=1, le=10**9)] = None,
    version: Annotated[int | None, Query(ge=0, le=10**9)] = None,
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    max_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    after: Cursor = "0.0",
) -> Page[RolloutView]:
    """Samples in the order in which their jobs were made."""
    seq, row = (min(int(part), SEQ_MAX) for part in after.split("."))
    with services.store.read() as session:
        find_run(session, run_id)
        jobs = _sampling_jobs(session, run_id, split, seq)
        steps = _trained_steps(session, run_id)
    found: list[RolloutView] = []
    for job_seq, key in jobs[:OBJECTS_PER_REQUEST]:
        samples = decode_rollouts(services.objects.get(key))
        for place in range(row if job_seq == seq else 0, len(samples)):
            view = _view(samples[place], steps if split == "train" else {})
            if not _matches(view, step, version, min_reward, max_reward):
                continue
            if len(found) == limit:
                return Page(data=tuple(found), has_more=True, next_cursor=f"{job_seq}.{place}")
            found.append(view)
    more = jobs[OBJECTS_PER_REQUEST:]
    return Page(
        data=tuple(found),
        has_more=bool(more),
        next_cursor=f"{more[0][0]}.0" if more else None,
    )


def _sampling_jobs(
    session: Session, run_id: str, split: Literal["train", "eval"], from_seq: int
) -> list[tuple[int, str]]:
    """Sequence number and rollouts key of each job that wrote samples of the split."""
    kind = JobKind.GENERATE if split == "train" else JobKind.EVALUATE
    rows = session.execute(
        select(JobRow.seq, JobRow.output)
        .where(
            JobRow.run_id == run_id,
            JobRow.kind == kind,
            JobRow.status == JobStatus.DONE,
            JobRow.samples_removed_at.is_(None),
            JobRow.seq >= from_seq,
        )
        .order_by(JobRow.seq)
        .limit(OBJECTS_PER_REQUEST + 1)
    ).all()
    outputs = [(seq, OUTPUT.validate_json(body)) for seq, body in rows if body]
    return [
        (seq, output.rollouts_key)
        for seq, output in outputs
        if isinstance(output, GenerateOutput | EvaluateOutput)
    ]


def _trained_steps(session: Session, run_id: str) -> dict[int, int | None]:
    rows = select(GroupRow.index, GroupRow.trained_step).where(GroupRow.run_id == run_id)
    return dict(session.execute(rows).all())


def _view(sample: Rollout, steps: dict[int, int | None]) -> RolloutView:
    return RolloutView(
        group_id=sample.group_id,
        prompt_id=sample.prompt_id,
        sample=sample.sample,
        policy_version=sample.policy_version,
        prompt=sample.prompt,
        completion=sample.completion,
        finish_reason=sample.finish_reason,
        reward=sample.reward,
        rewards=sample.rewards,
        num_tokens=len(sample.completion_ids),
        trained_step=steps.get(group_index(sample.group_id)) if steps else None,
    )


def _matches(
    view: RolloutView,
    step: int | None,
    version: int | None,
    min_reward: float | None,
    max_reward: float | None,
) -> bool:
    bounded = min_reward is not None or max_reward is not None
    if bounded and view.reward is None:
        return False
    return (
        (step is None or view.trained_step == step)
        and (version is None or view.policy_version == version)
        and (min_reward is None or (view.reward or 0.0) >= min_reward)
        and (max_reward is None or (view.reward or 0.0) <= max_reward)
    )


@router.get("/runs/{run_id}/adapter", response_class=FileResponse)
def adapter(
    services: ServicesDep,
    run_id: str,
    version: Annotated[int | None, Query(ge=0, le=10**9)] = None,
) -> FileResponse:
    """The PEFT folder of a version (the newest, where none is named) as a zip."""
    manifest = _manifest(services, run_id, version)
    folder = TemporaryDirectory(prefix="offbeat-adapter-")
    path = Path(folder.name) / "adapter.zip"
    try:
        _write_zip(services.objects, manifest, path)
    except BaseException:
        folder.cleanup()
        raise
    return FileResponse(
        path,
        media_type="application/zip",
        filename=f"{keys.adapter_name(run_id, manifest.version)}.zip",
        headers={"x-policy-version": str(manifest.version)},
        background=BackgroundTask(folder.cleanup),
    )


def _manifest(services: Services, run_id: str, version: int | None) -> Manifest:
    with services.store.read() as session:
        run = find_run(session, run_id)
        wanted = run.version if version is None else version
        for manifest in manifests(session, run_id):
            if manifest.version != wanted:
                continue
            if not manifest.has_adapter:
                raise NotFoundError(
                    f"run {run_id} trains all weights and has no adapter: /v1/runs/{run_id}/model "
                    "has what its last step writes"
                )
            check_adapter(session, run_id, manifest.version)
            return manifest
    if wanted is None:
        raise NotFoundError(f"run {run_id} has published no version yet")
    raise NotFoundError(f"run {run_id} has no version {wanted}; see /v1/runs/{run_id}/checkpoints")


def _write_zip(objects: S3ObjectStore, manifest: Manifest, path: Path) -> None:
    """Uncompressed, since weights do not compress; without times, so that equal versions are
    equal."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name in ADAPTER_FILES:
            part = path.with_name(name)
            objects.download(keys.version_file(manifest, name), part)
            with part.open("rb") as source, archive.open(zipfile.ZipInfo(name), "w") as target:
                while chunk := source.read(2**20):
                    target.write(chunk)
            part.unlink()
