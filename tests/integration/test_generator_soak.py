"""Two hundred versions of one run through a generator: what it holds stays the same."""

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from offbeat.contracts.weights import ADAPTER_WEIGHTS, Manifest
from offbeat.objects import S3ObjectStore
from scripts.bench.scale_meter import rss_bytes
from tests.adapters import upload
from tests.following import SPARE_MAX, Following, following
from tests.policies import Reference, peft_files, policy_tensors
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy

NUM_VERSIONS = 200
NUM_WARM = 80
"""Versions until caches, threads and connections are what they stay."""
NUM_CONTENTS = 3
"""Adapters that take turns as the content of versions, so that few canaries are computed."""
RANK = 256
"""Large enough that a version that is kept shows in the memory of the process."""


def content_of(version: int) -> int:
    return 1 + (version - 1) % NUM_CONTENTS if version else 0


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this process holds, the services of the test in it."""

    memory_bytes: int
    open_files: int
    threads: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        return cls(
            memory_bytes=rss_bytes(os.getpid()),
            open_files=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
        )


@pytest.fixture
def setting(
    proxy: RunningProxy, store: S3ObjectStore, tiny_model: Path, tmp_path: Path, run_id: str
) -> Iterator[Following]:
    reference = Reference(tiny_model, rank=RANK)
    with following(
        run_id, store, reference, proxy.url, tiny_model, tmp_path / "adapters"
    ) as running:
        yield running


def test_l3_l2_w1_two_hundred_versions_leave_nothing_behind(setting: Following) -> None:
    """Each is loaded once, under a name that never means anything else, and goes again."""
    canary = cache(setting.reference.canary)
    files = cache(lambda content: peft_files(policy_tensors(content, rank=RANK), RANK))

    def publish(version: int) -> Manifest:
        content, parent = content_of(version), content_of(max(version - 1, 0))
        manifest = upload(
            setting.store,
            setting.run_id,
            version,
            files(content),
            rank=RANK,
            canary=canary(content, parent),
        )
        setting.client.publish(manifest)
        return manifest

    def held_after(versions: range) -> Held:
        for version in versions:
            publish(version)
            setting.wait_for(version)
        wait_until(lambda: setting.serving == [versions[-1] - 1, versions[-1]])
        wait_until(lambda: len(setting.folders) == 1 + SPARE_MAX)
        return Held.now()

    publish(0)
    setting.policies.start()
    setting.wait_for(0)
    warm = held_after(range(1, NUM_WARM))
    later = held_after(range(NUM_WARM, NUM_VERSIONS))

    adapter_bytes = len(files(0)[ADAPTER_WEIGHTS])
    leak_bytes = (NUM_VERSIONS - NUM_WARM) * adapter_bytes
    assert later.memory_bytes - warm.memory_bytes < leak_bytes / 3
    assert later.open_files - warm.open_files < 10
    assert later.threads - warm.threads < 10
    assert setting.engine.loaded_most <= 2 + SPARE_MAX, "the new one is loaded before one goes"
    names = [name for name, _ in setting.engine.contents]
    assert names == [f"{setting.run_id}-v{version}" for version in range(NUM_VERSIONS)]
    files_left = [path for path in setting.folder.rglob("*") if path.is_file()]
    assert len(files_left) == 2 * (1 + SPARE_MAX)
