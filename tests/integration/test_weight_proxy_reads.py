"""The read side of the weight-proxy: long-polls, lists, files, health."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from offbeat.contracts.runs import Page
from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PublishedVersion
from offbeat.errors import NotFoundError, UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from offbeat.worker_api import WeightProxyClient
from scripts import parts
from tests.adapters import TRAINER_STATE, adapter_files, publishable
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy, running_proxy


def weights_url(proxy: RunningProxy, run_id: str) -> str:
    return f"{proxy.url}/v1/runs/{run_id}/weights"


def test_long_poll_wakes_on_publish(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        for version in range(2):
            manifest = publishable(store, run_id, version)
            waiting = [
                pool.submit(proxy.client.wait_for_newer, run_id, version - 1, 30) for _ in range(2)
            ]
            wait_until(lambda: proxy.metric("waiters") == 2)
            published = proxy.client.publish(manifest)
            assert [answer.result() for answer in waiting] == [published, published]
            assert proxy.metric("waiters") == 0
            assert proxy.client.wait_for_newer(run_id, version - 1, 30) == published


def test_two_replicas_see_each_others_publishes(
    store: S3ObjectStore, run_id: str, tmp_path: Path, database_url: str
) -> None:
    with (
        running_proxy(store, tmp_path / "a", database_url=database_url) as a,
        running_proxy(store, tmp_path / "b", database_url=database_url) as b,
        ThreadPoolExecutor(1) as pool,
    ):
        for version in range(2):
            waiting = pool.submit(b.client.wait_for_newer, run_id, version - 1, 30)
            wait_until(lambda: b.metric("waiters") == 1)
            published = a.client.publish(publishable(store, run_id, version))
            assert waiting.result() == published
            assert b.client.version(run_id, version) == published
        # Nobody waits at b, which knows of version 1.
        published = a.client.publish(publishable(store, run_id, 2))
        assert b.client.wait_for_newer(run_id, 1, 0) == published


def test_long_poll_ends_with_304(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    proxy.client.publish(publishable(store, run_id, 0))
    url = weights_url(proxy, run_id) + "/latest"
    for query in ({"after": 0}, {"after": 0, "wait_s": 0.05}, {"after": 7, "wait_s": 0.05}):
        answer = httpx.get(url, params=query)
        assert (answer.status_code, answer.content) == (304, b"")
    other = httpx.get(weights_url(proxy, f"{run_id}-other") + "/latest?after=-1&wait_s=0.05")
    assert other.status_code == 304
    for query in ({"after": -2}, {"after": 0, "wait_s": 61}, {"after": 0, "wait_s": "nan"}):
        assert httpx.get(url, params=query).status_code == 422


def test_readers_beyond_the_bound_are_turned_away(
    store: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    with (
        running_proxy(store, tmp_path, waiters_max=1) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(proxy.client.wait_for_newer, run_id, -1, 30)
        wait_until(lambda: proxy.metric("waiters") == 1)
        with pytest.raises(UnavailableError, match="1 readers wait already"):
            proxy.client.wait_for_newer(run_id, -1, 30)
        published = proxy.client.publish(publishable(store, run_id, 0))
        assert waiting.result() == published


def test_p2_what_is_absent_is_not_cached(proxy: RunningProxy, run_id: str) -> None:
    """P2: a cached 404 would hide a version after it was published."""
    url = weights_url(proxy, run_id)
    for path in ("/latest", "/0", f"/0/files/{ADAPTER_CONFIG}"):
        answer = httpx.get(url + path)
        assert (answer.status_code, answer.headers["cache-control"]) == (404, "no-store")
        assert answer.json()["type"] == "https://offbeat.dev/problems/not-found"


def test_latest_has_a_tag(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    url = weights_url(proxy, run_id) + "/latest"
    published = proxy.client.publish(publishable(store, run_id, 0))
    answer = httpx.get(url)
    tag = f'"0-{published.manifest.adapter_sha256}"'
    assert (answer.headers["etag"], answer.headers["cache-control"]) == (tag, "no-cache")
    assert PublishedVersion.model_validate_json(answer.content) == published
    for known in (tag, f'"other", W/{tag}'):
        same = httpx.get(url, headers={"if-none-match": known})
        assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    proxy.client.publish(publishable(store, run_id, 1))
    newer = httpx.get(url, headers={"if-none-match": tag})
    assert (newer.status_code, newer.json()["manifest"]["version"]) == (200, 1)


def test_versions_are_listed_in_pages(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    published = [proxy.client.publish(publishable(store, run_id, n)) for n in range(5)]
    url = weights_url(proxy, run_id)
    seen: list[tuple[int, ...]] = []
    after = "-1"
    while True:
        page = Page[PublishedVersion].model_validate_json(
            httpx.get(url, params={"after": after, "limit": 2}).content
        )
        assert page.data == tuple(published[item.manifest.version] for item in page.data)
        seen.append(tuple(item.manifest.version for item in page.data))
        assert page.has_more == (page.next_cursor is not None)
        if page.next_cursor is None:
            break
        after = page.next_cursor
    assert seen == [(0, 1), (2, 3), (4,)]
    assert httpx.get(weights_url(proxy, f"{run_id}-other")).json() == {
        "data": [],
        "has_more": False,
        "next_cursor": None,
    }
    assert httpx.get(url, params={"limit": 201}).status_code == 422


@pytest.mark.parametrize("rank", [2, 2048])
def test_files_are_served_byte_for_byte(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str, rank: int
) -> None:
    """An adapter of 2,776 bytes is one chunk, one of 1,836,064 bytes is two."""
    manifest = publishable(store, run_id, 0, rank=rank)
    proxy.client.publish(manifest)
    before = proxy.metric("served_bytes_total")
    files = adapter_files(0, rank=rank)
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, TRAINER_STATE):
        with proxy.client.stream_file(run_id, 0, name) as chunks:
            assert b"".join(chunks) == files[name]
    # Bytes are counted when they are sent, which the reader may see a moment earlier.
    served = sum(map(len, files.values()))
    wait_until(lambda: proxy.metric("served_bytes_total") - before == served)
    url = f"{weights_url(proxy, run_id)}/0/files/{ADAPTER_WEIGHTS}"
    answer = httpx.get(url)
    assert answer.headers["content-length"] == str(len(files[ADAPTER_WEIGHTS]))
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["etag"] == f'"{manifest.adapter_sha256}"'
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    again = httpx.get(url, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_range_request(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    """A reader whose transfer was cut goes on where it stopped."""
    manifest = publishable(store, run_id, 0)
    proxy.client.publish(manifest)
    whole = adapter_files(0)[ADAPTER_WEIGHTS]
    url = f"{weights_url(proxy, run_id)}/0/files/{ADAPTER_WEIGHTS}"
    for asked, part, described in (
        ("bytes=0-9", whole[:10], "bytes 0-9"),
        ("bytes=100-", whole[100:], f"bytes 100-{len(whole) - 1}"),
        ("bytes=-5", whole[-5:], f"bytes {len(whole) - 5}-{len(whole) - 1}"),
    ):
        answer = httpx.get(
            url, headers={"range": asked, "if-range": f'"{manifest.adapter_sha256}"'}
        )
        assert (answer.status_code, answer.content) == (206, part)
        assert answer.headers["content-range"] == f"{described}/{len(whole)}"
    other = httpx.get(url, headers={"range": "bytes=0-9", "if-range": '"other"'})
    assert (other.status_code, other.content) == (200, whole)
    assert httpx.get(url, headers={"range": f"bytes={len(whole)}-"}).status_code == 416


async def read_at_once(url: str, num_readers: int) -> list[bytes]:
    limits = httpx.Limits(max_connections=num_readers)
    async with httpx.AsyncClient(limits=limits, timeout=30) as client:
        answers = await asyncio.gather(*(client.get(url) for _ in range(num_readers)))
    return [answer.content for answer in answers]


def test_hundred_readers_cost_one_s3_read(
    store: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    """The replica that took the publish has read the file already; any other reads it once."""
    database_url = f"sqlite:///{tmp_path / 'shared.db'}"
    manifest = publishable(store, run_id, 0)
    body = adapter_files(0)[ADAPTER_WEIGHTS]
    path = f"/v1/runs/{run_id}/weights/0/files/{ADAPTER_WEIGHTS}"
    with (
        running_proxy(store, tmp_path / "a", database_url=database_url) as a,
        running_proxy(store, tmp_path / "b", database_url=database_url) as b,
    ):
        a.client.publish(manifest)
        for replica, num_reads in ((a, 2), (b, 1)):
            assert asyncio.run(read_at_once(replica.url + path, 100)) == [body] * 100
            assert replica.metric("store_reads_total") == num_reads


def test_an_object_that_changed_after_its_publish_is_not_served(
    store: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    manifest = publishable(store, run_id, 0)
    with running_proxy(store, tmp_path) as proxy:
        proxy.client.publish(manifest)
        store.put(manifest.prefix + TRAINER_STATE, b'{"step": 9}')
        answer = httpx.get(f"{weights_url(proxy, run_id)}/0/files/{TRAINER_STATE}")
    assert answer.status_code == 500
    assert answer.json()["type"] == "https://offbeat.dev/problems/integrity"


def raw_status(proxy: RunningProxy, path: str) -> int:
    """The answer to exactly this path: httpx would resolve its dots."""
    connection = HTTPConnection(proxy.url.removeprefix("http://"))
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_path_traversal_is_refused(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    manifest = publishable(store, run_id, 0)
    proxy.client.publish(manifest)
    path = f"/v1/runs/{run_id}/weights/0"
    assert raw_status(proxy, f"{path}/files/{ADAPTER_CONFIG}") == 200
    for name in (
        "..",
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/versions.db",
        "%2fetc%2fpasswd",
        f"..%2f{ADAPTER_CONFIG}",
        manifest.adapter_sha256,
    ):
        assert raw_status(proxy, f"{path}/files/{name}") == 404, name
    assert raw_status(proxy, f"{path}/files/{ADAPTER_CONFIG}%00") == 422
    for run in ("..", ".%2e", "..%5cetc", "a%0ab"):
        assert raw_status(proxy, f"/v1/runs/{run}/weights/latest") == 422, run
    hostile = manifest.model_dump(mode="json")
    hostile["files"][0]["name"] = f"../{ADAPTER_WEIGHTS}"
    answer = httpx.put(proxy.url + path, json=hostile)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "body.files.0.name")


def test_readiness_asks_the_database_and_the_store(
    proxy: RunningProxy, s3_settings: ObjectStoreSettings, tmp_path: Path
) -> None:
    assert httpx.get(f"{proxy.url}/readyz").json() == {"status": "ok"}
    missing = s3_settings.model_copy(update={"bucket": "missing"})
    with running_proxy(S3ObjectStore.connect(missing), tmp_path) as cut_off:
        assert httpx.get(f"{cut_off.url}/healthz").status_code == 200
        answer = httpx.get(f"{cut_off.url}/readyz")
        assert (answer.status_code, answer.json()["title"]) == (503, "A dependency is unavailable")


def test_metrics_are_those_of_prometheus(proxy: RunningProxy) -> None:
    answer = httpx.get(f"{proxy.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    names = {line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE")}
    assert {
        f"offbeat_weight_proxy_{name}"
        for name in (
            "publishes_total",
            "conflicts_total",
            "waiters",
            "served_bytes_total",
            "store_reads_total",
            "publish_verify_seconds",
        )
    } <= names


@contextmanager
def process(
    settings: ObjectStoreSettings, folder: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "OFFBEAT_WEIGHT_PROXY_PORT": str(port),
        "OFFBEAT_WEIGHT_PROXY_DATABASE_URL": f"sqlite:///{folder / 'versions.db'}",
        "OFFBEAT_WEIGHT_PROXY_CACHE_DIR": str(folder / "cache"),
        "OFFBEAT_S3_ENDPOINT_URL": str(settings.endpoint_url),
        "OFFBEAT_S3_BUCKET": settings.bucket,
        "OFFBEAT_S3_ACCESS_KEY_ID": settings.access_key_id,
        "OFFBEAT_S3_SECRET_ACCESS_KEY": settings.secret_access_key.get_secret_value(),
    }
    running = subprocess.Popen([sys.executable, "-m", "services.weight_proxy"], env=environment)

    def is_ready() -> bool:
        assert running.poll() is None, "the process ended before it was ready"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready)
        yield running
    finally:
        running.kill()
        running.wait()


def test_a_killed_process_comes_back_with_the_same_versions(
    s3_settings: ObjectStoreSettings, run_id: str, tmp_path: Path
) -> None:
    store = S3ObjectStore.connect(s3_settings.model_copy(update={"bucket": run_id}))
    store.create_bucket()
    settings = s3_settings.model_copy(update={"bucket": run_id})
    port = parts.free_port()
    client = WeightProxyClient(f"http://127.0.0.1:{port}")
    with process(settings, tmp_path, port) as running:
        published = client.publish(publishable(store, run_id, 0))
        running.send_signal(signal.SIGKILL)
    for lost in (None, "versions.db"):
        if lost:
            for path in tmp_path.glob(f"{lost}*"):
                path.unlink()
        with process(settings, tmp_path, port) as running:
            assert client.version(run_id, 0) == published
            running.send_signal(signal.SIGTERM)
            assert running.wait(timeout=60) in (0, -signal.SIGTERM)
    client.close()


def test_a_file_that_is_not_listed_is_not_found(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    manifest = publishable(store, run_id, 0)
    proxy.client.publish(manifest)
    store.put(manifest.prefix + "notes.txt", b"not in the manifest")
    with (
        pytest.raises(NotFoundError, match=r"has no file 'notes\.txt'"),
        proxy.client.stream_file(run_id, 0, "notes.txt"),
    ):
        pass
