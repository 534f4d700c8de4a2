"""The model that a run of full fine-tuning has made: the folder's files, and the bytes of each."""

from collections.abc import Iterator

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session

from offbeat import keys
from offbeat.contracts.runs import ModelView
from offbeat.contracts.weights import FileName, Manifest
from offbeat.errors import NotFoundError
from offbeat.objects import S3ObjectStore
from services.orchestrator.dependencies import ServicesDep, UserRoute, user
from services.orchestrator.published import manifests
from services.orchestrator.store import find_run

router = APIRouter(prefix="/v1", route_class=UserRoute, dependencies=[Depends(user)])

CHUNK_BYTES = 8 * 2**20
"""Read from the store at once, for each download under way."""


@router.get("/runs/{run_id}/model")
def model(services: ServicesDep, run_id: str) -> ModelView:
    """The files of the folder that `from_pretrained` loads, and where in the bucket it is."""
    with services.store.read() as session:
        manifest = _manifest(session, run_id)
    return ModelView(
        run_id=run_id,
        version=manifest.version,
        prefix=manifest.prefix,
        files=manifest.model_files,
    )


@router.get("/runs/{run_id}/model/{name}", response_class=StreamingResponse)
def model_file(services: ServicesDep, run_id: str, name: FileName) -> StreamingResponse:
    """One of them."""
    with services.store.read() as session:
        manifest = _manifest(session, run_id)
    file = next((file for file in manifest.model_files if file.name == name), None)
    if file is None:
        raise NotFoundError(f"the model of run {run_id} has no file {name!r}")
    chunks = _chunks(services.objects, keys.version_file(manifest, name), file.size_bytes)
    return StreamingResponse(
        chunks,
        media_type="application/octet-stream",
        headers={"content-length": str(file.size_bytes)},
    )


def _manifest(session: Session, run_id: str) -> Manifest:
    run = find_run(session, run_id)
    newest = next(manifests(session, run_id), None)
    if newest is not None and newest.model_files:
        return newest
    if newest is not None and newest.has_adapter:
        raise NotFoundError(
            f"run {run_id} trains an adapter and no model: /v1/runs/{run_id}/adapter has it"
        )
    raise NotFoundError(
        f"run {run_id} is {run.status} and has written no model: that is what its last step does"
    )


def _chunks(objects: S3ObjectStore, key: str, size_bytes: int) -> Iterator[bytes]:
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield objects.get_range(key, start, min(start + CHUNK_BYTES, size_bytes))
