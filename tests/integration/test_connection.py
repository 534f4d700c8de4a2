"""What a worker is told at its start, and real workers that know a URL, a token and Redis alone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from offbeat.client import OffbeatClient
from offbeat.connection import connected
from offbeat.contracts.connection import Connection, StoreAccess
from offbeat.contracts.runs import RunStatus
from offbeat.errors import ForbiddenError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings, WorkerSettings
from services.orchestrator.connection import connection_of
from services.orchestrator.settings import WorkersSettings
from tests.orchestrator import running_orchestrator
from tests.specs import spec_dict
from tests.waiting import wait_until
from tests.weight_proxy import running_proxy

TOKEN, STORE_SECRET = "worker-token-0123456789", "store-secret-0123456789"
RUN_TIMEOUT_S = 240.0
"""Both processes import torch."""
OWN_STORE = ObjectStoreSettings(
    endpoint_url="http://s3.inside:9000", secret_access_key=SecretStr(STORE_SECRET)
)
TOLD = connection_of(WorkersSettings(), OWN_STORE, "http://weights.inside:8001")


def asked() -> Connection:
    return TOLD


def not_asked() -> Connection:
    raise AssertionError("the orchestrator was asked")


def test_workers_are_told_the_orchestrators_own_settings() -> None:
    told = asked()
    assert told == Connection(
        weight_proxy_url="http://weights.inside:8001",
        store=StoreAccess(
            endpoint_url="http://s3.inside:9000",
            bucket="offbeat",
            region="us-east-1",
            access_key_id="offbeat",
            secret_access_key=SecretStr(STORE_SECRET),
        ),
    )
    assert STORE_SECRET not in repr(told)


def test_workers_are_told_what_is_set_for_them() -> None:
    workers = WorkersSettings(
        weight_proxy_url="https://weights.example.org",
        s3_endpoint_url="https://s3.example.org",
        s3_access_key_id="workers",
        s3_secret_access_key=SecretStr("of-the-workers"),
    )
    told = connection_of(workers, OWN_STORE, "http://weights.inside:8001")
    assert told.weight_proxy_url == "https://weights.example.org"
    assert told.store.endpoint_url == "https://s3.example.org"
    assert told.store.access_key_id == "workers"
    assert told.store.secret_access_key.get_secret_value() == "of-the-workers"


def test_a_key_without_its_secret_is_refused() -> None:
    with pytest.raises(ValidationError, match="both, or neither"):
        WorkersSettings(s3_access_key_id="workers")


def test_what_is_not_set_here_comes_from_the_orchestrator() -> None:
    settings = connected(WorkerSettings(store=ObjectStoreSettings()), asked)
    assert settings.weight_proxy_url == "http://weights.inside:8001"
    assert settings.store == OWN_STORE


def test_an_address_that_is_set_here_counts() -> None:
    store = ObjectStoreSettings(endpoint_url="http://s3.here:9000")
    settings = connected(WorkerSettings(weight_proxy_url="http://here:1", store=store), asked)
    assert settings.weight_proxy_url == "http://here:1"
    assert settings.store.endpoint_url == "http://s3.here:9000"
    assert settings.store.secret_access_key.get_secret_value() == STORE_SECRET


def test_a_worker_with_credentials_uses_its_own_store() -> None:
    store = ObjectStoreSettings(access_key_id="mine", secret_access_key=SecretStr("my-own"))
    assert connected(WorkerSettings(store=store), asked).store == store
    complete = WorkerSettings(weight_proxy_url="http://here:1", store=store)
    assert connected(complete, not_asked) is complete


def test_credentials_are_told_to_the_bearer_of_a_token_alone(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with running_orchestrator(
        tmp_path, valkey_url, store, worker_token=TOKEN, connection=TOLD
    ) as orchestrator:
        assert orchestrator.worker.connection() == TOLD
        answer = orchestrator.worker.http.get("/internal/connection")
        assert answer.headers["cache-control"] == "no-store"
    with (
        running_orchestrator(tmp_path, valkey_url, store, connection=TOLD) as open_to_all,
        pytest.raises(ForbiddenError, match="set OFFBEAT_WORKER_TOKEN on both sides") as refused,
    ):
        open_to_all.worker.connection()
    assert STORE_SECRET not in str(refused.value)


@contextmanager
def running_worker(role: str, folder: Path, **settings: str) -> Iterator[Path]:
    """A real worker process with these settings and no others; its log."""
    others = {name: value for name, value in os.environ.items() if "OFFBEAT_" not in name}
    log = folder / f"{role}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{role}"],
            cwd=folder,
            env={**others, "OMP_NUM_THREADS": "1", **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield log
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_workers_join_with_a_url_a_token_and_redis(
    tmp_path: Path,
    empty_broker: str,
    store: S3ObjectStore,
    s3_settings: ObjectStoreSettings,
    tiny_model: Path,
) -> None:
    with ExitStack() as running:
        proxy = running.enter_context(running_proxy(store, tmp_path, token=SecretStr(TOKEN)))
        orchestrator = running.enter_context(
            running_orchestrator(
                tmp_path,
                empty_broker,
                store,
                clock=time.time,
                message_lost_s=15.0,
                worker_token=TOKEN,
                connection=connection_of(WorkersSettings(), s3_settings, proxy.url),
            )
        )
        logs = [
            running.enter_context(
                running_worker(
                    role,
                    tmp_path,
                    OFFBEAT_ORCHESTRATOR_URL=orchestrator.url,
                    OFFBEAT_WORKER_TOKEN=TOKEN,
                    OFFBEAT_REDIS_URL=empty_broker,
                    OFFBEAT_LOG_LEVEL="DEBUG",
                )
            )
            for role in ("generator", "trainer")
        ]
        submitted = spec_dict(model={"id": str(tiny_model)}, train={"steps": 1})
        with OffbeatClient(orchestrator.url) as client:
            run_id = client.submit(submitted).id
            wait_until(lambda: client.run(run_id).status.is_final, RUN_TIMEOUT_S)
            run = client.run(run_id)
        told = [log.read_text() for log in logs]
        assert (run.status, run.progress.version) == (RunStatus.SUCCEEDED, 1), "\n".join(told)
    secrets = (TOKEN, s3_settings.secret_access_key.get_secret_value())
    assert [secret for text in told for secret in secrets if secret in text] == []
    assert all("Asking the orchestrator" in text for text in told)
