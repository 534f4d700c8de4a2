"""An orchestrator with an empty broker for each test, and a plain HTTP client of it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from offbeat.objects import S3ObjectStore
from tests.orchestrator import MESSAGE_LOST_S, Orchestrator, running_orchestrator


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
