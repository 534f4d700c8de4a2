"""TLS with a private authority to every dependency and service, and a reverse proxy in front."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from kombu.exceptions import OperationalError
from pydantic import SecretStr

from offbeat.client import OffbeatClient
from offbeat.contracts.jobs import JobKind, JobMessage, WorkerRole
from offbeat.errors import RateLimitedError, UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery
from offbeat.settings import ObjectStoreSettings, QueueSettings
from offbeat.worker_api import WeightProxyClient
from scripts import parts
from services.orchestrator.broker import CeleryBroker
from services.orchestrator.rates import RateLimiter
from tests.conftest import run_part
from tests.servers import serve
from tests.specs import spec_dict
from tests.tls import Certificate, certificate, reverse_proxy, tls_in_front_of

ADMIN_KEY, WORKER_TOKEN = "admin-key-0123456789", "worker-token-0123456789"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("pems"))


@pytest.fixture(scope="module")
def other_pems(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Of an authority that vouches for nobody here."""
    return certificate(tmp_path_factory.mktemp("other-pems"))


@pytest.fixture(scope="module")
def queue(valkey_url: str, pems: Certificate) -> Iterator[QueueSettings]:
    port = urlsplit(valkey_url).port
    assert port is not None
    with tls_in_front_of(port, pems) as tls_port:
        yield QueueSettings(
            redis_url=SecretStr(f"rediss://127.0.0.1:{tls_port}/0"), redis_ca_file=pems.authority
        )


@pytest.fixture(scope="module")
def objects(
    tmp_path_factory: pytest.TempPathFactory, pems: Certificate
) -> Iterator[ObjectStoreSettings]:
    port = parts.free_port()
    folder = tmp_path_factory.mktemp("s3-tls")
    settings = ObjectStoreSettings(
        endpoint_url=f"https://127.0.0.1:{port}",
        bucket="tests",
        access_key_id="test",
        secret_access_key=SecretStr("secret-of-the-store"),
        ca_file=pems.authority,
    )
    plain = parts.s3(port, folder / "objects", settings)
    tls = ("--cert", str(pems.chain), "--key", str(pems.key))
    part = parts.Part(
        name=plain.name,
        command=(*plain.command, *tls),
        environment=plain.environment,
        is_ready=plain.is_ready,
    )
    for _ in run_part(part, folder / "log"):
        yield settings


@pytest.fixture(scope="module")
def environment(
    tmp_path_factory: pytest.TempPathFactory,
    queue: QueueSettings,
    objects: ObjectStoreSettings,
    pems: Certificate,
) -> dict[str, str]:
    """The variables of services that speak TLS on all sides."""
    folder = tmp_path_factory.mktemp("services")
    return {
        "OFFBEAT_API_KEY": ADMIN_KEY,
        "OFFBEAT_WORKER_TOKEN": WORKER_TOKEN,
        "OFFBEAT_REDIS_URL": queue.redis_url.get_secret_value(),
        "OFFBEAT_REDIS_CA_FILE": str(pems.authority),
        "OFFBEAT_S3_ENDPOINT_URL": str(objects.endpoint_url),
        "OFFBEAT_S3_BUCKET": objects.bucket,
        "OFFBEAT_S3_ACCESS_KEY_ID": objects.access_key_id,
        "OFFBEAT_S3_SECRET_ACCESS_KEY": objects.secret_access_key.get_secret_value(),
        "OFFBEAT_S3_CA_FILE": str(pems.authority),
        "OFFBEAT_CA_FILE": str(pems.authority),
        "OFFBEAT_ORCHESTRATOR_DATABASE_URL": f"sqlite:///{folder}/orchestrator.db",
        "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{folder}/weight-proxy.db",
        "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / "cache"),
    }


def running_service(
    name: str, environment: dict[str, str], url: str, pems: Certificate, log: Path
) -> Iterator[None]:
    """`python -m services.<name>`, ready: so its dependencies answer too."""

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz", verify=pems.trust()).status_code == 200
        except httpx.TransportError:
            return False

    command = (sys.executable, "-m", f"services.{name}")
    part = parts.Part(name=name, command=command, environment=environment, is_ready=is_ready)
    return run_part(part, log)


def cli(url: str, ca_file: Path | None) -> subprocess.CompletedProcess[str]:
    own = {"OFFBEAT_URL": url, "OFFBEAT_API_KEY": ADMIN_KEY}
    trusted = {"OFFBEAT_CA_FILE": str(ca_file)} if ca_file else {}
    return subprocess.run(
        [parts.program("offbeat"), "list"],
        env={**os.environ, **own, **trusted},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.usefixtures("empty_broker")
def test_the_broker_is_reached_over_tls_and_its_certificate_is_checked(
    queue: QueueSettings, other_pems: Certificate
) -> None:
    broker = CeleryBroker(create_celery(queue, "test"))
    broker.send(JobKind.TRAIN, "default", JobMessage(job_id="job-1", attempt=1))
    assert broker.depth(WorkerRole.TRAINER, "default") == 1
    # Kombu shares connections between clients of one address, so each has its own here.
    address = queue.redis_url.get_secret_value().removesuffix("0")
    for database, ca_file in ((1, None), (2, other_pems.authority)):
        distrustful = QueueSettings(
            redis_url=SecretStr(f"{address}{database}"), redis_ca_file=ca_file
        )
        with pytest.raises(OperationalError, match="CERTIFICATE_VERIFY_FAILED"):
            CeleryBroker(create_celery(distrustful, "test")).depth(WorkerRole.TRAINER, "default")


def test_rates_are_counted_over_tls(queue: QueueSettings) -> None:
    rates = RateLimiter("1/hour", queue.redis_url.get_secret_value(), queue.redis_ca_file)
    rates.check("key-tls")
    with pytest.raises(RateLimitedError):
        rates.check("key-tls")


def test_the_store_is_reached_over_tls_and_its_certificate_is_checked(
    objects: ObjectStoreSettings, other_pems: Certificate
) -> None:
    store = S3ObjectStore.connect(objects)
    store.put("tls/object", b"bytes")
    assert store.get("tls/object") == b"bytes"
    for ca_file in (None, other_pems.authority):
        distrustful = S3ObjectStore.connect(objects.model_copy(update={"ca_file": ca_file}))
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            distrustful.size_bytes("tls/object")


def test_the_services_speak_tls_on_all_sides(
    environment: dict[str, str], pems: Certificate, tmp_path: Path
) -> None:
    ports = [parts.free_port(), parts.free_port()]
    url, proxy_url = (f"https://127.0.0.1:{port}" for port in ports)
    environment = {
        **environment,
        "OFFBEAT_TLS_CERT_FILE": str(pems.chain),
        "OFFBEAT_TLS_KEY_FILE": str(pems.key),
        "OFFBEAT_ORCHESTRATOR_PORT": str(ports[0]),
        "OFFBEAT_WEIGHT_PROXY_PORT": str(ports[1]),
        "OFFBEAT_WEIGHT_PROXY_URL": proxy_url,
    }
    for _ in running_service("weight_proxy", environment, proxy_url, pems, tmp_path / "proxy.log"):
        token = SecretStr(WORKER_TOKEN)
        trusting = WeightProxyClient(proxy_url, token, ca_file=pems.authority)
        assert trusting.version("run-x", 1) is None
        trusting.close()
        for _ in running_service("orchestrator", environment, url, pems, tmp_path / "log"):
            assert cli(url, pems.authority).returncode == 0
            distrustful = cli(url, None)
            assert distrustful.returncode == 5
            assert "CERTIFICATE_VERIFY_FAILED" in distrustful.stderr


def test_a_reverse_proxy_shows_the_service_below_a_path(
    environment: dict[str, str],
    pems: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = parts.free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **environment,
        "OFFBEAT_ORCHESTRATOR_PORT": str(port),
        "OFFBEAT_ROOT_PATH": "/offbeat",
    }
    for _ in running_service("orchestrator", environment, url, pems, tmp_path / "log"):
        with (
            serve(reverse_proxy(url, "/offbeat")) as plain,
            tls_in_front_of(urlsplit(plain).port or 0, pems) as tls_port,
        ):
            public = f"https://127.0.0.1:{tls_port}"
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            with httpx.Client(verify=pems.trust(), headers=headers) as http:
                redirect = http.get(f"{public}/offbeat/v1/runs/")
                assert redirect.headers["location"] == f"{public}/offbeat/v1/runs"
                assert "/offbeat/openapi.json" in http.get(f"{public}/offbeat/docs").text
            monkeypatch.setenv("OFFBEAT_CA_FILE", str(pems.authority))
            with OffbeatClient(f"{public}/offbeat", ADMIN_KEY) as client:
                run_id = client.submit(spec_dict()).id
                client.cancel(run_id)
                kinds = [event.kind for event in client.stream_events(run_id)]
                assert kinds[-1] == "run_cancelled"
