"""Every route of both services, found from the applications themselves, against every kind of key:
a route that is added and not thought of fails here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from pydantic import SecretStr

from offbeat.client import OffbeatClient
from offbeat.objects import S3ObjectStore
from offbeat.projects import Projects
from tests.orchestrator import Orchestrator, running_orchestrator, submit
from tests.weight_proxy import running_proxy

ADMIN_KEY, WORKER_TOKEN = "admin-key-0123456789", "worker-token-0123456789"
Route = tuple[str, str]
"""Method and path."""

OPEN = {
    ("GET", path)
    for path in (
        "/docs",
        "/docs/oauth2-redirect",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/readyz",
        "/redoc",
    )
}
"""They tell health, counts and the description of the routes, and nothing of any run."""
FOR_EVERY_KEY = {
    ("GET", "/v1/models"): 200,
    ("GET", "/v1/models/{model}"): 404,
    ("GET", "/v1/projects/{project_id}"): 404,
    ("GET", "/v1/runs"): 200,
    ("GET", "/v1/workers"): 200,
    ("POST", "/v1/chat/completions"): 400,
    ("POST", "/v1/plan"): 422,
    ("POST", "/v1/runs"): 422,
}
"""What another project's key gets, without a body, where the path names no run; `test_projects.py`
shows that these routes keep projects apart."""


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A service with keys, and what stands for the parameters of its paths."""

    url: str
    app: FastAPI
    parameters: dict[str, str]

    @property
    def routes(self) -> list[Route]:
        """Every route, whether the OpenAPI document has it or not."""
        return sorted(
            (method, context.path or "")
            for context in iter_route_contexts(self.app.routes)
            for method in context.methods or ()
            if method != "HEAD"
        )

    def status(self, route: Route, secret: str | None) -> int:
        """Of the answer to a request without a body."""
        method, path = route
        headers = {b"authorization": f"Bearer {secret}".encode()} if secret else {}
        url = self.url + path.format(**self.parameters)
        response = httpx.request(method, url, headers=headers, timeout=60)
        if response.is_error:
            assert response.json().keys() & {"type", "error"}, f"{route}: not a known error"
        return response.status_code


@dataclass(frozen=True, kw_only=True)
class Keyed(Guarded):
    """An orchestrator with two projects and a run of the first, which its paths name."""

    orchestrator: Orchestrator
    key: str
    other_key: str


@pytest.fixture(scope="module")
def keyed(
    tmp_path_factory: pytest.TempPathFactory, valkey_url: str, store: S3ObjectStore
) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("orchestrator")
    with running_orchestrator(
        folder, valkey_url, store, api_key=ADMIN_KEY, worker_token=WORKER_TOKEN
    ) as running:
        with OffbeatClient(running.url, ADMIN_KEY) as admin:
            projects = Projects(admin)
            for project in ("ours", "theirs"):
                projects.create(project)
            key, other_key = (
                projects.create_key(project, "test").secret for project in ("ours", "theirs")
            )
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=running.url, headers=headers) as http:
            run_id = submit(http)
        yield Keyed(
            url=running.url,
            app=running.app,
            parameters={
                "run_id": run_id,
                "project_id": "ours",
                "worker_id": "worker-x",
                "job_id": "job-x",
                "replay_id": "job-x",
                "key_id": "key-x",
                "name": "config.json",
                "model": run_id,
            },
            orchestrator=running,
            key=key,
            other_key=other_key,
        )


def test_what_is_open_without_a_key_is_listed(keyed: Keyed) -> None:
    assert {route for route in keyed.routes if keyed.status(route, None) != 401} == OPEN


@pytest.mark.parametrize("secret", ["wrong", "ofb_0123456789_" + 43 * "A", "é"])
def test_a_wrong_key_is_no_key(keyed: Keyed, secret: str) -> None:
    assert {keyed.status(route, secret) for route in keyed.routes if route not in OPEN} == {401}


def test_the_workers_token_opens_the_workers_routes_alone(keyed: Keyed) -> None:
    opened = {route for route in keyed.routes if keyed.status(route, WORKER_TOKEN) != 401} - OPEN
    assert opened == {route for route in keyed.routes if route[1].startswith("/internal/")}


def test_a_users_key_does_not_open_the_workers_routes(keyed: Keyed) -> None:
    internal = [route for route in keyed.routes if route[1].startswith("/internal/")]
    for secret in (keyed.key, ADMIN_KEY):
        assert {keyed.status(route, secret) for route in internal} == {401}


def test_another_projects_key_finds_nothing(keyed: Keyed) -> None:
    users = [route for route in keyed.routes if route[1].startswith("/v1/")]
    assert {route: keyed.status(route, keyed.other_key) for route in users} == {
        route: 404 if "{run_id}" in route[1] else FOR_EVERY_KEY.get(route, 403) for route in users
    }


def test_the_own_key_and_the_admin_key_find_the_run(keyed: Keyed) -> None:
    run = ("GET", "/v1/runs/{run_id}")
    assert [keyed.status(run, secret) for secret in (keyed.key, ADMIN_KEY)] == [200, 200]
    assert keyed.status(("GET", "/v1/projects"), ADMIN_KEY) == 200


def test_the_weight_proxy_takes_the_workers_token_alone(
    store: S3ObjectStore, tmp_path: Path
) -> None:
    with running_proxy(store, tmp_path, token=SecretStr(WORKER_TOKEN)) as running:
        parameters = {"run_id": "run-x", "version": "1", "name": "adapter_config.json"}
        proxy = Guarded(url=running.url, app=running.app, parameters=parameters)
        assert {route for route in proxy.routes if proxy.status(route, None) != 401} == OPEN
        for route in set(proxy.routes) - OPEN:
            statuses = [proxy.status(route, key) for key in ("wrong", ADMIN_KEY, WORKER_TOKEN)]
            assert statuses[:2] == [401, 401]
            assert statuses[2] in (200, 204, 404, 422)


def test_requests_without_a_valid_key_are_limited_by_address(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    """Users' and workers' routes count together, and a valid key is let through all the same."""
    with (
        running_orchestrator(
            tmp_path,
            valkey_url,
            store,
            api_key=ADMIN_KEY,
            worker_token=WORKER_TOKEN,
            stranger_rate="4/hour",
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        strangers = [
            http.get("/v1/runs"),
            http.get("/v1/runs", headers={"authorization": "Bearer wrong"}),
            http.get("/v1/models", headers={"authorization": "Bearer wrong"}),
            http.delete("/internal/workers/w", headers={"authorization": f"Bearer {ADMIN_KEY}"}),
            http.get("/v1/runs", headers={"authorization": f"Bearer {WORKER_TOKEN}"}),
            http.delete("/internal/workers/w"),
        ]
        assert [one.status_code for one in strangers] == [401, 401, 401, 401, 429, 429]
        assert strangers[-1].json()["detail"] == (
            "this address may send 4 per 1 hour without a valid key: send one as `Authorization: "
            "Bearer <key>`"
        )
        assert 0 < int(strangers[-1].headers["retry-after"]) <= 3600
        known = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert http.get("/v1/runs", headers=known).status_code == 200


def test_the_document_says_which_routes_take_a_key(keyed: Keyed) -> None:
    document = keyed.app.openapi()
    secured = {
        (method.upper(), path): operation.get("security", [])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert {route for route, security in secured.items() if not security} == {
        ("GET", path) for path in ("/healthz", "/readyz", "/metrics")
    }
    assert [{"key": []}] in secured.values()
    schemes = document["components"]["securitySchemes"]
    assert {name: (one["type"], one["scheme"]) for name, one in schemes.items()} == {
        "key": ("http", "bearer")
    }


def test_the_weight_proxys_document_names_the_workers_token(
    store: S3ObjectStore, tmp_path: Path
) -> None:
    with running_proxy(store, tmp_path) as running:
        document = running.app.openapi()
    assert document["components"]["securitySchemes"]["worker_token"]["scheme"] == "bearer"
    assert document["paths"]["/v1/runs/{run_id}/weights/latest"]["get"]["security"] == [
        {"worker_token": []}
    ]
    assert "security" not in document["paths"]["/healthz"]["get"]
