"""The relay between services and S3: it passes everything on, and does the harm that a rule
names."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest

from offbeat.errors import UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from scripts.chaos.relay import Cut, LoseReply, LoseRequest, Refuse, Relay, Slow
from scripts.chaos.rules import FirstOnes
from scripts.parts import free_port

BODY = bytes(range(256)) * 4000
UNSIGNED = HTTPStatus.BAD_REQUEST
"""What rclone says to a request without a signature."""


@pytest.fixture
def relay(s3_settings: ObjectStoreSettings) -> Iterator[Relay]:
    assert s3_settings.endpoint_url is not None
    with Relay() as running:
        running.upstreams = [s3_settings.endpoint_url]
        yield running


@pytest.fixture
def relayed(relay: Relay, s3_settings: ObjectStoreSettings) -> S3ObjectStore:
    """The store as the services see it."""
    return S3ObjectStore.connect(s3_settings.model_copy(update={"endpoint_url": relay.url}))


def test_signed_requests_pass_as_they_are(relayed: S3ObjectStore, run_id: str) -> None:
    relayed.put(f"{run_id}/a b+c", BODY)
    assert relayed.get(f"{run_id}/a b+c") == BODY
    assert relayed.size_bytes(f"{run_id}/a b+c") == len(BODY)
    assert relayed.size_bytes(f"{run_id}/missing") is None
    assert list(relayed.list(f"{run_id}/")) == [f"{run_id}/a b+c"]


def test_a_download_is_cut_half_way(relay: Relay, store: S3ObjectStore, run_id: str) -> None:
    store.put(f"{run_id}/a", BODY)
    relay.rule = lambda _: Cut()
    # Unsigned, so the body is S3's refusal: half of it arrives.
    with pytest.raises(httpx.RemoteProtocolError, match="received"):
        httpx.get(f"{relay.url}/tests/{run_id}/a")


def test_the_store_is_asked_again_after_refusals(
    relay: Relay, relayed: S3ObjectStore, run_id: str
) -> None:
    relay.rule = FirstOnes(lambda _: True, Refuse(status=HTTPStatus.SERVICE_UNAVAILABLE), 2)
    relayed.put(f"{run_id}/a", b"x")
    assert relayed.get(f"{run_id}/a") == b"x"


def test_a_store_that_is_patient_outlives_an_outage(
    relay: Relay, s3_settings: ObjectStoreSettings, run_id: str
) -> None:
    through_relay = s3_settings.model_copy(update={"endpoint_url": relay.url})
    patient = S3ObjectStore.connect(through_relay, retry_for_s=60)
    relay.close()
    with pytest.raises(UnavailableError, match="Could not connect"):
        S3ObjectStore.connect(through_relay).put(f"{run_id}/a", BODY)
    with ThreadPoolExecutor() as pool:
        put = pool.submit(patient.put, f"{run_id}/a", BODY)
        assert not put.done()
        relay.open()
        put.result()
    relay.rule = FirstOnes(lambda request: request.method == "GET", Cut(), 2)
    assert patient.get(f"{run_id}/a") == BODY


def test_a_download_that_is_always_cut_is_an_outage(
    relay: Relay, relayed: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    relayed.put(f"{run_id}/a", BODY)
    relay.rule = lambda request: Cut() if request.method == "GET" else None
    with pytest.raises(UnavailableError, match="the object store failed on"):
        relayed.download(f"{run_id}/a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_lost_reply_comes_after_the_write_and_a_lost_request_before_it(
    relay: Relay, relayed: S3ObjectStore, store: S3ObjectStore, run_id: str
) -> None:
    relay.rule = lambda request: LoseReply() if request.path.endswith("/a") else LoseRequest()
    for name in ("a", "b"):
        with pytest.raises(UnavailableError):
            relayed.put(f"{run_id}/{name}", b"x")
    assert list(store.list(f"{run_id}/")) == [f"{run_id}/a"]


def test_a_closed_relay_refuses_and_an_open_one_answers(relay: Relay) -> None:
    with httpx.Client(base_url=relay.url) as kept:
        assert kept.get("/").status_code == UNSIGNED
        relay.close()
        with pytest.raises(httpx.TransportError):
            kept.get("/")
        with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
            probe.connect(("127.0.0.1", int(relay.url.rpartition(":")[2])))
        relay.open()
        assert kept.get("/").status_code == UNSIGNED
    relay.rule = lambda _: Slow(seconds=0.01)
    assert httpx.get(relay.url).status_code == UNSIGNED


def test_a_balancer_goes_to_the_next_upstream(s3_settings: ObjectStoreSettings) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert s3_settings.endpoint_url is not None
    with Relay() as relay:
        relay.upstreams = [nobody, s3_settings.endpoint_url]
        assert [httpx.get(relay.url).status_code for _ in range(3)] == [UNSIGNED] * 3
        relay.upstreams = [nobody]
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(relay.url)
