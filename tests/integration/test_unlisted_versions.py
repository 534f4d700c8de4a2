"""Versions are found in the weight-proxy's table, never by listing the store."""

from collections.abc import Iterator
from pathlib import Path

from offbeat import keys
from offbeat.contracts.weights import ADAPTER_CONFIG
from offbeat.objects import S3ObjectStore, StoredObject
from offbeat.settings import ObjectStoreSettings
from tests.adapters import adapter_files, publishable
from tests.weight_proxy import running_proxy


class UnlistedStore(S3ObjectStore):
    """A store whose listings are stale: they show nothing."""

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        raise AssertionError(f"{prefix} was listed")


def test_p3_versions_are_published_and_read_without_a_listing(
    s3_settings: ObjectStoreSettings, tmp_path: Path, run_id: str
) -> None:
    store = UnlistedStore.connect(s3_settings)
    with running_proxy(store, tmp_path) as running:
        for version in (0, 1):
            running.client.publish(publishable(store, run_id, version))
        later = publishable(store, run_id, 2)
        store.put(keys.manifest(run_id, 2), later.model_dump_json().encode())
        newest = running.client.wait_for_newer(run_id, after=-1, wait_s=0)
        assert newest is not None
        assert newest.manifest.version == 1
        with running.client.stream_file(run_id, 1, ADAPTER_CONFIG) as chunks:
            assert b"".join(chunks) == adapter_files(1)[ADAPTER_CONFIG]
