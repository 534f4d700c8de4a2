"""The services that tests share: an orchestrator with an empty broker for each test, and a
weight-proxy, a trainer and a vLLM server for those that ask for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from services.trainer.publish import Trainer
from tests.fake_vllm import FakeVllm, running_vllm
from tests.orchestrator import Orchestrator, running_orchestrator
from tests.service_process import API_KEY, WORKER_TOKEN, ServiceProcess, running_service
from tests.specs import spec
from tests.trainer import Run, new_run, trainer_on
from tests.vllm_engine import VllmSetting, checked_engine
from tests.weight_proxy import RunningProxy, running_proxy


@pytest.fixture
def new_trainer(
    tiny_model: Path, store: S3ObjectStore, proxy: RunningProxy
) -> Callable[[], Trainer]:
    """A trainer process that has just started."""
    return lambda: trainer_on(tiny_model, store, proxy.client)


@pytest.fixture
def empty_broker(valkey_url: str) -> str:
    """The URL of Valkey, with nothing left of other tests."""
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    return valkey_url


@pytest.fixture
def orchestrator(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[Orchestrator]:
    """On a clock that only the test moves on, once over SQLite and once over PostgreSQL."""
    with running_orchestrator(tmp_path, empty_broker, store, database_url=database_url) as running:
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


@pytest.fixture(scope="module")
def proxy(store: S3ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A weight-proxy over SQLite."""
    with running_proxy(store, tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture
def trainer(tiny_model: Path, store: S3ObjectStore, proxy: RunningProxy) -> Trainer:
    """One that has just started, on that weight-proxy."""
    return trainer_on(tiny_model, store, proxy.client)


@pytest.fixture
def run(store: S3ObjectStore, proxy: RunningProxy) -> Run:
    """A run of four steps, without any version."""
    return new_run(store, proxy, spec(train={"steps": 4}))


@pytest.fixture(scope="module")
def vllm_server(tiny_model: Path) -> Iterator[tuple[FakeVllm, str]]:
    """A fake vLLM on the tiny model, and its URL."""
    with running_vllm(tiny_model) as running:
        yield running


@pytest.fixture
def setting(
    vllm_server: tuple[FakeVllm, str], tiny_model: Path, tmp_path: Path
) -> Iterator[VllmSetting]:
    """That server without faults, and an engine that has checked it."""
    with checked_engine(*vllm_server, tiny_model, tmp_path) as setting:
        yield setting
