"""No secret is written anywhere: a small life of the whole stack at log level DEBUG, then a look
into every file that it left."""

import hashlib
import io
import subprocess
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import RunStatus
from offbeat.errors import OffbeatError
from offbeat.projects import Projects
from scripts import parts
from scripts.stack import Stack, StackOptions, running_stack
from services.orchestrator.store import Store
from tests.specs import spec_dict
from tests.waiting import wait_until

pytestmark = pytest.mark.system

ADMIN_KEY, WORKER_TOKEN, REDIS_PASSWORD, WRONG_KEY = (token_urlsafe(32) for _ in range(4))
RUN_TIMEOUT_S = 180.0


class Broker:
    """A Valkey that asks for a password, and that a test takes away for a while."""

    def __init__(self, folder: Path) -> None:
        self.port = parts.free_port()
        command = parts.valkey(self.port, folder).command
        self._command = (*command, "--requirepass", REDIS_PASSWORD)
        self._process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        return self._process

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


def tiny_spec(model: Path, **changes: Any) -> dict[str, Any]:
    return spec_dict(
        model={"id": str(model)}, rewards=[{"type": "regex", "pattern": "[a-m]"}], **changes
    )


def wait_for_end(client: OffbeatClient, run_id: str) -> RunStatus:
    return client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status


def live(stack: Stack, model: Path, broker: Broker) -> str:
    """Runs that succeed and fail, refusals, and an outage of the broker; the secret of the
    project's key."""
    url = stack.addresses.orchestrator
    with OffbeatClient(url, ADMIN_KEY) as admin:
        projects = Projects(admin)
        projects.create("team")
        secret = projects.create_key("team", "test").secret
    with OffbeatClient(url, secret) as client, OffbeatClient(url, WRONG_KEY) as stranger:
        done = client.submit(tiny_spec(model, train={"steps": 1}))
        assert wait_for_end(client, done.id) is RunStatus.SUCCEEDED
        failed = client.submit(tiny_spec(Path("/no/such/model")))
        assert wait_for_end(client, failed.id) is RunStatus.FAILED
        for refused in (
            stranger.runs,
            lambda: client.submit(tiny_spec(model, lora={"init_from": "s3://k:s3cr3t-x@b/f"})),
        ):
            with pytest.raises(OffbeatError):
                refused()
        raw = httpx.post(f"{url}/v1/runs?key={WRONG_KEY}", json={"model": WRONG_KEY})
        assert raw.status_code == 401
        assert WRONG_KEY not in raw.text
        broker.stop()
        waiting = client.submit(tiny_spec(model, train={"steps": 1}))
        log = stack.options.logs / "orchestrator.log"
        wait_until(lambda: "broker does not answer" in log.read_text())
        broker.start()
        assert wait_for_end(client, waiting.id) is RunStatus.SUCCEEDED
    return secret


def test_no_secret_is_in_any_log_database_or_object(tiny_model: Path, tmp_path: Path) -> None:
    broker = Broker(tmp_path / "valkey")
    options = StackOptions(
        data_dir=tmp_path / "data",
        settings={
            "OFFBEAT_LOG_LEVEL": "DEBUG",
            "OFFBEAT_API_KEY": ADMIN_KEY,
            "OFFBEAT_WORKER_TOKEN": WORKER_TOKEN,
            "OFFBEAT_REDIS_URL": f"redis://:{REDIS_PASSWORD}@127.0.0.1:{broker.port}/0",
        },
    )
    try:
        with running_stack(options, io.StringIO()) as stack:
            key = live(stack, tiny_model, broker)
            store_secret = stack.object_store.secret_access_key.get_secret_value()
    finally:
        broker.stop()
    files = {path: path.read_bytes() for path in options.data_dir.rglob("*") if path.is_file()}
    secrets = {ADMIN_KEY, WORKER_TOKEN, REDIS_PASSWORD, WRONG_KEY, store_secret, key, "s3cr3t-x"}
    found = {
        (str(path), secret)
        for path, body in files.items()
        for secret in secrets
        if secret.encode() in body
    }
    assert found == set()
    hashed = hashlib.sha256(key.encode()).hexdigest().encode()
    with_hash = {path.name for path, body in files.items() if hashed in body}
    assert with_hash & {"orchestrator.db", "orchestrator.db-wal"}, "the database was looked into"
    assert any(path.suffix == ".parquet" for path in files), "the object store was looked into"
    assert (options.logs / "generator-1.log") in files


def test_a_database_that_does_not_answer_is_told_without_its_password() -> None:
    store = Store.connect("postgresql+psycopg://user:hunter2@127.0.0.1:1/none")
    with pytest.raises(OffbeatError) as refused:
        store.ping()
    assert "hunter2" not in str(refused.value)
    with pytest.raises(OperationalError) as failed, store.read() as session:
        session.connection()
    assert "hunter2" not in str(failed.value)
