"""Where the real processes listen, with keys and without, and what settings they refuse."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.settings import ObjectStoreSettings
from scripts import parts
from tests.waiting import wait_until

KEYS = {
    "OFFBEAT_API_KEY": "admin-key-0123456789",
    "OFFBEAT_WORKER_TOKEN": "worker-token-0123456789",
}
OTHER_ADDRESS = "127.0.0.2"
"""This machine under an address that a service on 127.0.0.1 does not listen on."""


@pytest.fixture
def environment(
    tmp_path: Path, valkey_url: str, s3_settings: ObjectStoreSettings
) -> dict[str, str]:
    return {
        "OFFBEAT_HOST": "0.0.0.0",
        "OFFBEAT_REDIS_URL": valkey_url,
        "OFFBEAT_S3_ENDPOINT_URL": str(s3_settings.endpoint_url),
        "OFFBEAT_S3_BUCKET": s3_settings.bucket,
        "OFFBEAT_S3_ACCESS_KEY_ID": s3_settings.access_key_id,
        "OFFBEAT_S3_SECRET_ACCESS_KEY": s3_settings.secret_access_key.get_secret_value(),
        "OFFBEAT_ORCHESTRATOR_DATABASE_URL": f"sqlite:///{tmp_path}/orchestrator.db",
        "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{tmp_path}/weight-proxy.db",
        "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(tmp_path / "cache"),
    }


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def listening(service: str, environment: dict[str, str], log: Path) -> Iterator[int]:
    """The port on which the service listens on 127.0.0.1 at least."""
    port = parts.free_port()
    own = {"OFFBEAT_ORCHESTRATOR_PORT": str(port), "OFFBEAT_WEIGHT_PROXY_PORT": str(port)}
    command = [sys.executable, "-m", f"services.{service}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment, **own}, stdout=output, stderr=output
        )
        try:
            wait_until(lambda: answers("127.0.0.1", port) or process.poll() is not None)
            yield port
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.mark.parametrize("service", ["orchestrator", "weight_proxy"])
def test_without_a_key_a_service_listens_on_loopback_only_and_says_so(
    service: str, environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    without = {**environment, "OFFBEAT_API_KEY": "", "OFFBEAT_WORKER_TOKEN": ""}
    with listening(service, without, log) as port:
        assert not answers(OTHER_ADDRESS, port)
    assert "No key is configured, so the service listens on loopback only." in log.read_text()
    with listening(service, {**environment, **KEYS}, log) as port:
        assert answers(OTHER_ADDRESS, port)
    assert "No key is configured" not in log.read_text()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"OFFBEAT_API_KEY": "short-secret"}, "at least 16"),
        ({"OFFBEAT_WORKER_TOKEN": KEYS["OFFBEAT_API_KEY"]}, "must not be the same"),
        ({"OFFBEAT_RATE_LIMIT": "very many"}, "rate_limit"),
        ({"OFFBEAT_TLS_CERT_FILE": __file__}, "OFFBEAT_TLS_KEY_FILE both, or neither"),
        ({"OFFBEAT_S3_CA_FILE": "/no/such/file"}, "ca_file"),
    ],
)
def test_bad_settings_are_refused_without_telling_any(
    environment: dict[str, str], changes: dict[str, str], complaint: str
) -> None:
    given = {**environment, **KEYS, **changes}
    ended = subprocess.run(
        [sys.executable, "-m", "services.orchestrator"],
        env={**os.environ, **given},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert complaint in ended.stderr
    for secret in (given["OFFBEAT_API_KEY"], given["OFFBEAT_S3_SECRET_ACCESS_KEY"]):
        assert secret not in ended.stdout + ended.stderr
