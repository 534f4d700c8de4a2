"""The two services as a worker sees them: the orchestrator's internal routes and the
weight-proxy."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httpx

from offbeat.contracts.connection import Connection
from offbeat.contracts.leases import (
    CompleteRequest,
    FailRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
    ReleaseRequest,
    WorkerReport,
)
from offbeat.contracts.weights import Manifest, PublishedVersion
from offbeat.errors import ConflictError, NotFoundError, OutageError
from offbeat.http import ServiceClient, raise_for_problem

REPORT_RETRY_S = 600.0
"""A finished result is offered this long to an orchestrator that restarts or fails over."""
LEASE_RETRY_S = 15.0
START_RETRY_S = 600.0
"""A worker that starts before the orchestrator waits this long for it."""
PROXY_RETRY_S = 60.0


class OrchestratorClient(ServiceClient):
    """`/internal/*` of the orchestrator."""

    def connection(self) -> Connection:
        """Where the weight-proxy and the object store are."""
        response = self.call("GET", "/internal/connection", retry_for_s=START_RETRY_S)
        return Connection.model_validate_json(response.content)

    def lease(self, job_id: str, request: LeaseRequest) -> Lease:
        """Take the job; `ConflictError` means: acknowledge the message and drop it,
        `HeldBackError`: the same, and take no other for a while."""
        response = self.call(
            "POST",
            f"/internal/jobs/{job_id}/lease",
            json=request.model_dump(mode="json"),
            retry_for_s=LEASE_RETRY_S,
        )
        return Lease.model_validate_json(response.content)

    def heartbeat(self, job_id: str, request: HeartbeatRequest) -> HeartbeatReply:
        """Keep the lease; `ConflictError` means: stop working."""
        response = self.call(
            "POST", f"/internal/jobs/{job_id}/heartbeat", json=request.model_dump(mode="json")
        )
        return HeartbeatReply.model_validate_json(response.content)

    def complete(self, job_id: str, request: CompleteRequest) -> None:
        """Hand in the result. Repeating it is safe."""
        self.call(
            "POST",
            f"/internal/jobs/{job_id}/complete",
            json=request.model_dump(mode="json"),
            retry_for_s=REPORT_RETRY_S,
        )

    def fail(self, job_id: str, request: FailRequest) -> None:
        """Give the job back with the reason."""
        self.call(
            "POST",
            f"/internal/jobs/{job_id}/fail",
            json=request.model_dump(mode="json"),
            retry_for_s=LEASE_RETRY_S,
        )

    def release(self, job_id: str, request: ReleaseRequest) -> None:
        """Hand the job back: another worker does it, and nothing counts as failed."""
        self.call("POST", f"/internal/jobs/{job_id}/release", json=request.model_dump(mode="json"))

    def leave(self, worker_id: str) -> None:
        """Say that the worker takes no more jobs; it may still complete what it holds."""
        self.call("DELETE", f"/internal/workers/{worker_id}")

    def report(self, worker_id: str, report: WorkerReport) -> None:
        """Say that the worker lives, what it serves and what it saw."""
        self.call("PUT", f"/internal/workers/{worker_id}", json=report.model_dump(mode="json"))


class VersionTakenError(ConflictError):
    """Another manifest won this version; it is in `winner`."""

    def __init__(self, winner: PublishedVersion) -> None:
        super().__init__(
            f"version {winner.manifest.version} was published by job {winner.manifest.job_id} "
            f"attempt {winner.manifest.attempt}"
        )
        self.winner = winner

    def __reduce__(self) -> tuple[type["VersionTakenError"], tuple[PublishedVersion]]:
        return type(self), (self.winner,)


class WeightProxyClient(ServiceClient):
    """Publish, watch and pull policy versions."""

    def publish(self, manifest: Manifest) -> PublishedVersion:
        """Make the version visible. `VersionTakenError` carries the winner where there is one."""
        path = f"/v1/runs/{manifest.run_id}/weights/{manifest.version}"
        try:
            response = self.call(
                "PUT",
                path,
                json=manifest.model_dump(mode="json"),
                retry_for_s=PROXY_RETRY_S,
            )
        except ConflictError as conflict:
            winner = self.version(manifest.run_id, manifest.version)
            if winner is None:
                raise
            raise VersionTakenError(winner) from conflict
        return PublishedVersion.model_validate_json(response.content)

    def version(self, run_id: str, version: int) -> PublishedVersion | None:
        """One version, or None where it is not published."""
        try:
            response = self.call(
                "GET", f"/v1/runs/{run_id}/weights/{version}", retry_for_s=PROXY_RETRY_S
            )
        except NotFoundError:
            return None
        return PublishedVersion.model_validate_json(response.content)

    def forget(self, run_id: str) -> None:
        """Remove the versions of a deleted run, whose objects are gone, from the table."""
        self.call("DELETE", f"/v1/runs/{run_id}/weights")

    def wait_for_newer(self, run_id: str, after: int, wait_s: float) -> PublishedVersion | None:
        """Long-poll: the newest version above `after`, or None when `wait_s` has passed."""
        response = self.call(
            "GET",
            f"/v1/runs/{run_id}/weights/latest",
            params={"after": after, "wait_s": wait_s},
            timeout=httpx.Timeout(wait_s + 10.0, connect=5.0),
        )
        if response.status_code == HTTPStatus.NOT_MODIFIED:
            return None
        return PublishedVersion.model_validate_json(response.content)

    @contextmanager
    def stream_file(self, run_id: str, version: int, name: str) -> Iterator[Iterator[bytes]]:
        """The bytes of one file, in chunks; the caller checks size and hash."""
        path = f"/v1/runs/{run_id}/weights/{version}/files/{name}"
        try:
            with self.http.stream("GET", path) as response:
                if response.status_code >= HTTPStatus.BAD_REQUEST:
                    response.read()
                raise_for_problem(response)
                yield response.iter_bytes()
        except httpx.TransportError as error:
            raise OutageError(f"{path} broke off: {error!r}") from error
