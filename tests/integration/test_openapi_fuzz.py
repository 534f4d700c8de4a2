"""Requests that schemathesis makes from the OpenAPI documents, valid and wrong: none makes a
service fail, and every answer is one that the document has.

`make fuzz` sends fifty times as many.
"""

import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from pydantic import SecretStr
from schemathesis import Case, CheckFunction, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from offbeat.objects import S3ObjectStore
from services.orchestrator import internal_api
from tests.adapters import publishable
from tests.orchestrator import (
    GENERATOR,
    Hand,
    Orchestrator,
    running_orchestrator,
    submit,
)
from tests.weight_proxy import running_proxy

EXAMPLES_MAX = int(os.environ.get("OFFBEAT_FUZZ_EXAMPLES", "4"))
"""Of each operation, valid and wrong."""
CALL_TIMEOUT_S = 60.0
KEY, TOKEN = "admin-key-0123456789", "worker-token-0123456789"
CHECKS = [
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


def fuzz(
    document: Mapping[str, object],
    url: str,
    secret: str,
    known: Mapping[str, Any],
    checks: list[CheckFunction] = CHECKS,
) -> list[str]:
    """Call every operation of the document; what was called. Every second request names what is
    known to be there, in its path and in its body, so that it gets past the first look."""
    load_all_checks()
    operations: list[APIOperation] = []
    for found in schemathesis.openapi.from_dict(dict(document)).get_all_operations():
        assert isinstance(found, Ok)
        operations.append(found.ok())
    operations.sort(key=lambda operation: operation.method == "delete")
    with requests.Session() as session:
        session.headers["authorization"] = f"Bearer {secret}"
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _fuzz_operation(operation, mode, url, session, known, checks)
    return [operation.label for operation in operations]


def _fuzz_operation(
    operation: APIOperation,
    mode: GenerationMode,
    url: str,
    session: requests.Session,
    known: Mapping[str, Any],
    checks: list[CheckFunction],
) -> None:
    numbers = count()

    @settings(
        max_examples=EXAMPLES_MAX,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Case) -> None:
        if next(numbers) % 2:
            _name_known(case, known)
        _wait_not_long(case)
        response = case.call(base_url=url, session=session, timeout=CALL_TIMEOUT_S)
        described = f"{case.as_curl_command()}\n{response.status_code}: {response.text}"
        assert response.status_code < 500 or response.status_code == 503, described
        if checks:
            case.validate_response(response, checks=checks)

    try:
        call()
    except Unsatisfiable:  # an operation without parameters cannot be called wrongly
        assert mode is GenerationMode.NEGATIVE


def _name_known(case: Case, known: Mapping[str, Any]) -> None:
    for part in (case.path_parameters, case.body):
        if isinstance(part, dict):
            for name in part.keys() & known.keys():
                part[name] = known[name]


def _wait_not_long(case: Case) -> None:
    """A long-poll may take a minute, and this is no test of its patience."""
    wait_s = case.query.get("wait_s") if isinstance(case.query, dict) else None
    if isinstance(wait_s, int | float) and 0 < wait_s <= 60:
        case.query["wait_s"] = 0


def internal_document() -> dict[str, object]:
    """The description of the workers' routes, which the public one leaves out."""
    app = FastAPI()
    for route in internal_api.router.routes:
        assert isinstance(route, APIRoute)
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=list(route.methods or ()),
            status_code=route.status_code,
        )
    return app.openapi()


@pytest.fixture
def orchestrator(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[Orchestrator]:
    with running_orchestrator(
        tmp_path,
        empty_broker,
        store,
        database_url=database_url,
        api_key=KEY,
        worker_token=TOKEN,
    ) as running:
        yield running


def test_no_request_makes_the_orchestrator_fail(orchestrator: Orchestrator) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=orchestrator.url, headers=headers, timeout=60) as http:
        http.post("/v1/projects", json={"id": "ours"}).raise_for_status()
        run_id = submit(http)
        hand = Hand(orchestrator)
        hand.report(GENERATOR, "hand")
        lease = hand.leased(GENERATOR)
        known = {
            "run_id": run_id,
            "job_id": lease.job_id,
            "attempt": lease.attempt,
            "worker_id": "hand",
            "project_id": "ours",
            "model": run_id,
        }
        workers = fuzz(internal_document(), orchestrator.url, TOKEN, known, checks=[])
        document = http.get("/openapi.json").json()
        users = fuzz(document, orchestrator.url, KEY, known)
        assert (len(workers), len(users) > 25) == (len(internal_api.router.routes), True)
        assert http.get("/readyz").status_code == 200


def test_no_request_makes_the_weight_proxy_fail(
    store: S3ObjectStore, tmp_path: Path, database_url: str, run_id: str
) -> None:
    with running_proxy(
        store, tmp_path, database_url=database_url, token=SecretStr(TOKEN)
    ) as running:
        manifest = publishable(store, run_id, 0)
        running.client.publish(manifest)
        known = {**manifest.model_dump(mode="json"), "name": "adapter_config.json"}
        called = fuzz(running.app.openapi(), running.url, TOKEN, known)
        assert "PUT /v1/runs/{run_id}/weights/{version}" in called
        assert httpx.get(f"{running.url}/readyz").status_code == 200
