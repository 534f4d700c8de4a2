"""The weight-proxy over HTTP: which publish of a version wins, and which are refused."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr
from safetensors.numpy import save

from offbeat import keys
from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Manifest, PublishedVersion
from offbeat.errors import ConflictError, IntegrityError, InvalidRequestError, UnauthorizedError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from offbeat.worker_api import VersionTakenError, WeightProxyClient
from services.weight_proxy.registry import Registry
from tests.adapters import TRAINER_STATE, adapter_files, adapter_tensors, publishable, upload
from tests.postgres import PostgresServer
from tests.weight_proxy import RunningProxy, running_proxy


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def proxy(
    request: pytest.FixtureRequest,
    store: S3ObjectStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningProxy]:
    folder = tmp_path_factory.mktemp("proxy")
    if request.param == "sqlite":
        with running_proxy(store, folder) as running:
            yield running
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.url(server.create_database())
    with running_proxy(store, folder, database_url=url) as running:
        yield running


def put(proxy: RunningProxy, manifest: Manifest) -> httpx.Response:
    path = f"/v1/runs/{manifest.run_id}/weights/{manifest.version}"
    return httpx.put(proxy.url + path, json=manifest.model_dump(mode="json"))


def test_first_complete_publish_wins(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    first = publishable(store, run_id, 0, job_id="job-a")
    second = publishable(store, run_id, 0, job_id="job-b", seed=1)
    assert put(proxy, first).status_code == 201
    with pytest.raises(VersionTakenError, match="version 0 was published by job job-a") as refused:
        proxy.client.publish(second)
    assert refused.value.winner.manifest == first
    assert proxy.client.wait_for_newer(run_id, -1, 0) == refused.value.winner
    stored = PublishedVersion.model_validate_json(store.get(keys.manifest(run_id, 0)))
    assert stored == refused.value.winner


def test_same_manifest_again_gets_the_same_answer(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    manifest = publishable(store, run_id, 0)
    first = put(proxy, manifest)
    store.put(keys.manifest(run_id, 0), b"lost")
    again = put(proxy, manifest)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.content == again.content == store.get(keys.manifest(run_id, 0))


def test_p1_a_version_is_invisible_until_every_object_is_there(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    files = adapter_files(0)
    prefix = keys.version_prefix(run_id, 0, "job-x", 1)
    manifest = upload(store, f"{run_id}-elsewhere", 0, files).model_copy(
        update={"run_id": run_id, "prefix": prefix}
    )
    for name in (TRAINER_STATE, ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        with pytest.raises(InvalidRequestError, match="upload it before the manifest"):
            proxy.client.publish(manifest)
        assert proxy.client.version(run_id, 0) is None
        assert proxy.client.wait_for_newer(run_id, -1, 0) is None
        store.put(prefix + name, files[name])
    assert proxy.client.publish(manifest).manifest == manifest
    assert proxy.client.version(run_id, 0) is not None


def test_an_object_of_another_size_is_refused(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    manifest = publishable(store, run_id, 0)
    store.put(manifest.prefix + TRAINER_STATE, b"{}")
    with pytest.raises(InvalidRequestError, match="has 2 bytes, not 11"):
        proxy.client.publish(manifest)
    assert proxy.client.version(run_id, 0) is None


@pytest.mark.parametrize("name", [ADAPTER_WEIGHTS, ADAPTER_CONFIG])
def test_p12_a_wrong_hash_is_refused(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str, name: str
) -> None:
    manifest = publishable(store, run_id, 0)
    body = store.get(manifest.prefix + name)
    store.put(manifest.prefix + name, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(InvalidRequestError, match=r"sha256 .* but its manifest says"):
        proxy.client.publish(manifest)
    assert proxy.client.version(run_id, 0) is None
    store.put(manifest.prefix + name, body)
    assert proxy.client.publish(manifest).manifest == manifest


def test_p4_a_shard_saved_as_whole_is_refused(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    """P4: one rank of two wrote its own rows. Of B only the parent's shapes tell."""
    proxy.client.publish(publishable(store, run_id, 0))
    for factor, message in (
        ("lora_A", r"has shape \(1, 32\), which does not fit rank 2"),
        ("lora_B", r"has shape \(16, 2\), but \(32, 2\) in the parent"),
    ):
        shard = {
            name: tensor[: len(tensor) // 2].copy() if factor in name else tensor
            for name, tensor in adapter_tensors(1).items()
        }
        files = adapter_files(1) | {ADAPTER_WEIGHTS: save(shard)}
        with pytest.raises(InvalidRequestError, match=message):
            proxy.client.publish(upload(store, run_id, 1, files, job_id=factor))
    assert proxy.client.version(run_id, 1) is None


def test_truncated_safetensors_is_refused(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    """P6: the manifest truthfully describes a file that was cut before it was hashed."""
    files = adapter_files(0)
    whole = files[ADAPTER_WEIGHTS]
    for size_bytes in (len(whole) - 4, 100, 7):
        cut = files | {ADAPTER_WEIGHTS: whole[:size_bytes]}
        with pytest.raises(InvalidRequestError, match="cut off"):
            proxy.client.publish(upload(store, run_id, 0, cut))
    assert proxy.client.version(run_id, 0) is None


def test_parent_must_exist(proxy: RunningProxy, store: S3ObjectStore, run_id: str) -> None:
    child = publishable(store, run_id, 1)
    with pytest.raises(ConflictError, match="the parent, version 0, is not published"):
        proxy.client.publish(child)
    proxy.client.publish(publishable(store, run_id, 0))
    for wrong in (None, 1):
        with pytest.raises(InvalidRequestError, match=f"parent of version 1 is 0, not {wrong}"):
            proxy.client.publish(child.model_copy(update={"parent": wrong}))
    assert proxy.client.publish(child).manifest == child


def test_manifest_that_contradicts_itself_is_refused(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    manifest = publishable(store, run_id, 0)
    weights, config, state = manifest.files
    for update, message in (
        ({"attempt": 2}, "this attempt writes under"),
        ({"files": (weights, state)}, r"\['adapter_config.json'\] must be listed"),
        ({"files": (weights, config, config)}, "listed twice"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            proxy.client.publish(manifest.model_copy(update=update))
    answer = httpx.put(
        f"{proxy.url}/v1/runs/{run_id}/weights/1", json=manifest.model_dump(mode="json")
    )
    assert answer.status_code == 422
    assert "send it to its own path" in answer.json()["detail"]


def test_one_of_two_manifests_wins_among_sixteen_writers(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    rivals = [publishable(store, run_id, 0, job_id=f"job-{seed}", seed=seed) for seed in (0, 1)]
    before = proxy.metric("publishes_total")

    def publish(index: int) -> tuple[int, PublishedVersion]:
        client = WeightProxyClient(proxy.url)
        try:
            return index % 2, client.publish(rivals[index % 2])
        except VersionTakenError as taken:
            return index % 2, taken.winner
        finally:
            client.close()

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(publish, range(16)))
    winner = proxy.client.version(run_id, 0)
    assert winner is not None
    assert winner.manifest in rivals
    assert [answer for _, answer in answers] == [winner] * 16
    assert proxy.metric("publishes_total") - before == 1


def test_two_replicas_let_one_publish_win(
    store: S3ObjectStore, run_id: str, tmp_path: Path, database_url: str
) -> None:
    with (
        running_proxy(store, tmp_path / "a", database_url=database_url) as a,
        running_proxy(store, tmp_path / "b", database_url=database_url) as b,
    ):
        first = a.client.publish(publishable(store, run_id, 0, job_id="job-a"))
        with pytest.raises(VersionTakenError) as refused:
            b.client.publish(publishable(store, run_id, 0, job_id="job-b", seed=1))
        assert refused.value.winner == first


def test_replicas_that_start_at_once_make_one_table(postgres_url: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        registries = list(pool.map(Registry.connect, [postgres_url] * 8))
    for registry in registries:
        assert registry.is_empty()
        registry.close()


def test_a_file_that_was_removed_is_gone_and_its_row_stays(
    store: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    manifest = publishable(store, run_id, 0)
    with running_proxy(store, tmp_path / "a") as proxy:
        published = proxy.client.publish(manifest)
        store.delete(manifest.prefix + ADAPTER_WEIGHTS)
        store.delete(manifest.prefix + ADAPTER_WEIGHTS)
    registry = f"sqlite:///{tmp_path / 'a' / 'versions.db'}"
    with running_proxy(store, tmp_path / "b", database_url=registry) as cold:
        assert cold.client.version(run_id, 0) == published
        path = f"{cold.url}/v1/runs/{run_id}/weights/0/files/"
        gone = httpx.get(path + ADAPTER_WEIGHTS)
        assert gone.status_code == 410
        assert gone.json()["type"] == "https://offbeat.dev/problems/gone"
        assert httpx.get(path + ADAPTER_CONFIG).status_code == 200


def test_the_versions_of_a_deleted_run_are_forgotten(
    proxy: RunningProxy, store: S3ObjectStore, run_id: str
) -> None:
    proxy.client.publish(publishable(store, run_id, 0))
    kept = proxy.client.publish(publishable(store, f"{run_id}-other", 0))
    for _ in range(2):
        proxy.client.forget(run_id)
        assert proxy.client.version(run_id, 0) is None
        assert proxy.client.wait_for_newer(run_id, -1, 0.05) is None
    assert proxy.client.version(f"{run_id}-other", 0) == kept


def test_p13_the_table_is_rebuilt_from_the_store(
    s3_settings: ObjectStoreSettings, run_id: str, tmp_path: Path
) -> None:
    store = S3ObjectStore.connect(s3_settings.model_copy(update={"bucket": run_id}))
    store.create_bucket()
    with running_proxy(store, tmp_path) as proxy:
        published = [proxy.client.publish(publishable(store, run_id, n)) for n in range(3)]
        other = proxy.client.publish(publishable(store, f"{run_id}-other", 0))
    registry = Registry.connect(f"sqlite:///{tmp_path / 'new.db'}")
    assert registry.is_empty()
    assert registry.rebuild(store) == 4
    assert registry.page(run_id, -1, 10).data == tuple(published)
    assert registry.latest(f"{run_id}-other") == other
    assert registry.rebuild(store) == 4, "a second replica that starts at the same time"
    assert registry.page(run_id, -1, 10).data == tuple(published)
    store.put(keys.manifest(run_id, 3), b"{}")
    with pytest.raises(IntegrityError, match=r"000003\.json' is not a manifest"):
        registry.rebuild(store)
    registry.close()
    fresh = Registry.connect(f"sqlite:///{tmp_path / 'fresh.db'}")
    with pytest.raises(IntegrityError):
        fresh.rebuild(store)
    assert fresh.is_empty(), (
        "a rebuild that fails leaves nothing, so that the next start repeats it"
    )
    fresh.close()


def test_token_is_needed(store: S3ObjectStore, run_id: str, tmp_path: Path) -> None:
    manifest = publishable(store, run_id, 0)
    with running_proxy(store, tmp_path, token=SecretStr("right")) as proxy:
        for token in (None, SecretStr("wrong")):
            client = WeightProxyClient(proxy.url, token)
            with pytest.raises(UnauthorizedError):
                client.publish(manifest)
            with pytest.raises(UnauthorizedError):
                client.wait_for_newer(run_id, -1, 0)
            client.close()
        assert proxy.client.publish(manifest).manifest == manifest
        path = f"/v1/runs/{run_id}/weights/0/files/{ADAPTER_CONFIG}"
        assert httpx.get(proxy.url + path).status_code == 401
        assert httpx.get(f"{proxy.url}/healthz").json() == {"status": "ok"}


def test_oversized_and_malformed_bodies_are_refused(proxy: RunningProxy, run_id: str) -> None:
    url = f"{proxy.url}/v1/runs/{run_id}/weights/0"
    assert httpx.put(url, json={"padding": "x" * 2**20}).status_code == 413
    deep = httpx.put(url, content=b"[" * 100_000, headers={"content-type": "application/json"})
    assert deep.status_code in (400, 422)
    wrong = httpx.put(url, json={"run_id": run_id})
    assert wrong.status_code == 422
    assert "body.files" in {entry["field"] for entry in wrong.json()["errors"]}
    assert json.loads(httpx.get(f"{proxy.url}/healthz").content) == {"status": "ok"}
