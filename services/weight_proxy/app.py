"""The HTTP side of the weight-proxy: publish, watch and pull policy versions.

A publish is checked against the objects in the store, then one insert decides. Readers learn of a
version from the table alone, never by listing the store, and get its files from the local cache.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import BufferedReader
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response, Security
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from offbeat.contracts.bounds import INT_MAX, Id, Version
from offbeat.contracts.runs import Page
from offbeat.contracts.weights import Manifest, PublishedVersion
from offbeat.errors import NotFoundError
from offbeat.request_bodies import BodyLimit
from offbeat.strict_routes import StrictRoute
from offbeat.web import PROBLEMS, RequestId, install_errors, require_token
from services.weight_proxy.proxy import WeightProxy

MANIFEST_BYTES_MAX = 2**20
WAIT_S_MAX = 60
"""Longer than many load balancers keep a silent connection; a reader simply asks again."""
PAGE_ROWS_MAX = 200


def create_app(proxy: WeightProxy, worker_token: SecretStr | None) -> FastAPI:
    """The application over its parts; without a token, whoever can connect may use it."""
    app = FastAPI(title="Offbeat weight-proxy", lifespan=_lifespan, responses=PROBLEMS)
    app.state.proxy = proxy
    app.state.worker_token = worker_token
    install_errors(app)
    app.add_middleware(BodyLimit, bytes_max=MANIFEST_BYTES_MAX)
    app.add_middleware(RequestId)
    app.include_router(versions)
    app.include_router(health)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    proxy: WeightProxy = app.state.proxy
    watching = asyncio.create_task(proxy.waiters.watch())
    yield
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    proxy.registry.close()


TOKEN = HTTPBearer(scheme_name="worker_token", auto_error=False, description="The workers' token.")


class WorkerRoute(StrictRoute):
    """Lets the bearer of the worker token pass; without a token, everybody."""

    async def admit(self, request: Request) -> None:
        """Compare the token."""
        require_token(request, request.app.state.worker_token)


async def _proxy(request: Request) -> WeightProxy:
    return request.app.state.proxy


versions = APIRouter(
    prefix="/v1/runs/{run_id}/weights", route_class=WorkerRoute, dependencies=[Security(TOKEN)]
)
health = APIRouter()

BYTES: dict[str, object] = {"content": {"application/octet-stream": {}}}
Proxy = Annotated[WeightProxy, Depends(_proxy)]
After = Annotated[int, Query(ge=-1, le=INT_MAX)]


@versions.put(
    "/{version}",
    response_model=PublishedVersion,
    status_code=201,
    responses={200: {"model": PublishedVersion, "description": "It was there already."}},
)
async def publish(run_id: Id, version: Version, manifest: Manifest, proxy: Proxy) -> Response:
    """Make a version visible: 201 the first time, 200 on a repeat, 409 if another one won."""
    published, is_new = await proxy.publish(run_id, version, manifest)
    return _json(published, status_code=201 if is_new else 200)


@versions.get(
    "/latest",
    response_model=PublishedVersion,
    responses={304: {"description": "There is no newer one."}},
)
async def latest(
    request: Request,
    run_id: Id,
    proxy: Proxy,
    after: After | None = None,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0,
) -> Response:
    """The newest version; with `after`, wait for one above it (-1: for the first)."""
    if after is None:
        published = await to_thread.run_sync(proxy.registry.latest, run_id)
        if published is None:
            raise NotFoundError(f"run {run_id!r} has no version yet: wait with `?after=-1`")
    else:
        published = await proxy.waiters.wait(run_id, after, wait_s)
        if published is None:
            return Response(status_code=304)
    manifest = published.manifest
    headers = {
        "etag": f'"{manifest.version}-{manifest.sha256}"',
        "cache-control": "no-cache",
    }
    if _is_known(request, headers["etag"]):
        return Response(status_code=304, headers=headers)
    return _json(published, headers=headers)


@versions.get("")
def versions_of_run(
    run_id: Id,
    proxy: Proxy,
    after: After = -1,
    limit: Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX)] = 50,
) -> Page[PublishedVersion]:
    """The versions of a run above `after`, oldest first."""
    return proxy.registry.page(run_id, after, limit)


@versions.delete("", status_code=204)
def forget(run_id: Id, proxy: Proxy) -> None:
    """Forget the versions of a run that was deleted together with its objects."""
    proxy.registry.forget(run_id)


@versions.get("/{version}", response_model=PublishedVersion)
async def one_version(run_id: Id, version: Version, proxy: Proxy) -> Response:
    """One version."""
    return _json(await proxy.published(run_id, version))


@versions.get(
    "/{version}/files/{name}",
    response_class=FileResponse,
    responses={
        200: BYTES,
        206: {**BYTES, "description": "The ranges asked for."},
        304: {"description": "The reader has it."},
    },
)
async def file_of_version(
    request: Request, run_id: Id, version: Version, name: str, proxy: Proxy
) -> Response:
    """The bytes of one file, whole or in ranges."""
    published = await proxy.published(run_id, version)
    file, opened = await proxy.open_file(published.manifest, name)
    etag = f'"{file.sha256}"'
    if _is_known(request, etag):
        opened.close()
        return Response(status_code=304, headers={"etag": etag})
    return OpenFileResponse(opened, etag, proxy.metrics.served_bytes)


@health.get("/healthz")
async def healthz() -> dict[str, Literal["ok"]]:
    """The process is alive."""
    return {"status": "ok"}


@health.get("/readyz")
def readyz(proxy: Proxy) -> dict[str, Literal["ok"]]:
    """The database and the store answer; 503 otherwise."""
    proxy.registry.ping()
    proxy.store.ping()
    return {"status": "ok"}


@health.get("/metrics", response_class=PlainTextResponse)
def metrics(proxy: Proxy) -> Response:
    """Prometheus."""
    return Response(generate_latest(proxy.metrics.registry), media_type=CONTENT_TYPE_LATEST)


class OpenFileResponse(FileResponse):
    """Serves a file that is open already, so that eviction cannot pull it away, and closes it.

    `/dev/fd` opens the same inode anew, with an offset of its own, even after it was unlinked.
    """

    chunk_size = 2**20
    """Each chunk is a trip through a thread. Sixteen readers at once are served in two thirds of
    the time that 256 KiB take, and a hundred hold 100 MiB."""

    def __init__(self, opened: BufferedReader, etag: str, served_bytes: Counter) -> None:
        found = os.fstat(opened.fileno())
        super().__init__(
            f"/dev/fd/{opened.fileno()}",
            headers={"etag": etag, "cache-control": "private, max-age=31536000, immutable"},
            media_type="application/octet-stream",
            stat_result=found,
        )
        self._has_one_chunk = found.st_size <= self.chunk_size
        self._opened = opened
        self._served_bytes = served_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file or the ranges asked for, and count the bytes."""

        async def counted(message: Message) -> None:
            await send(message)
            self._served_bytes.inc(len(message.get("body", b"")))

        with self._opened:
            if self._has_one_chunk and "range" not in Headers(scope=scope):
                # Trips through threads would cost more than the read.
                self.body = self._opened.read()
                await Response.__call__(self, scope, receive, counted)
            else:
                await super().__call__(scope, receive, counted)


def _json(
    published: PublishedVersion, *, status_code: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        published.model_dump_json(),
        status_code=status_code,
        headers=headers,
        media_type="application/json",
    )


def _is_known(request: Request, etag: str) -> bool:
    """Whether `If-None-Match` lists the tag (RFC 9110, 13.1.2: the comparison is weak)."""
    given = request.headers.get("if-none-match", "")
    return etag in {tag.strip().removeprefix("W/") for tag in given.split(",")}
