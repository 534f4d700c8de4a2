"""An orchestrator with an empty broker for each test, and a plain HTTP client of it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from tests.orchestrator import MESSAGE_LOST_S, Orchestrator, running_orchestrator
from tests.service_process import API_KEY, WORKER_TOKEN, ServiceProcess, running_service


@pytest.fixture
def orchestrator(
    tmp_path: Path, database_url: str, valkey_url: str, store: S3ObjectStore
) -> Iterator[Orchestrator]:
    """On a clock that only the test moves on, once over SQLite and once over PostgreSQL."""
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    with running_orchestrator(
        tmp_path, valkey_url, store, database_url=database_url, message_lost_s=MESSAGE_LOST_S
    ) as running:
        yield running


@pytest.fixture
def http(orchestrator: Orchestrator) -> Iterator[httpx.Client]:
    """Speaks to it."""
    with httpx.Client(base_url=orchestrator.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def orchestrator_process(
    tmp_path_factory: pytest.TempPathFactory, valkey_url: str, s3_settings: ObjectStoreSettings
) -> Iterator[ServiceProcess]:
    """An orchestrator with keys, as a process of its own."""
    environment = {
        "OFFBEAT_REDIS_URL": valkey_url,
        "OFFBEAT_API_KEY": API_KEY,
        "OFFBEAT_WORKER_TOKEN": WORKER_TOKEN,
    }
    folder = tmp_path_factory.mktemp("orchestrator-process")
    with running_service("orchestrator", folder, s3_settings, environment) as running:
        yield running
