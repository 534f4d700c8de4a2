"""Hostile adapters and manifests to a weight-proxy that is a process of its own."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Manifest
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from tests.adapters import adapter_config, adapter_files, adapter_tensors, upload
from tests.service_process import WORKER_TOKEN, ServiceProcess, running_service
from tests.waiting import wait_until

AUTH = {"authorization": f"Bearer {WORKER_TOKEN}"}
A, B = (f"base_model.model.q.lora_{factor}.weight" for factor in "AB")
Entry = dict[str, Any]


@pytest.fixture(scope="module")
def proxy(
    tmp_path_factory: pytest.TempPathFactory, s3_settings: ObjectStoreSettings
) -> Iterator[ServiceProcess]:
    environment = {"OFFBEAT_WORKER_TOKEN": WORKER_TOKEN}
    folder = tmp_path_factory.mktemp("weight-proxy-process")
    with running_service("weight_proxy", folder, s3_settings, environment) as running:
        yield running


def put(proxy: ServiceProcess, run_id: str, document: object, version: str = "0") -> httpx.Response:
    return proxy.http.put(
        f"/v1/runs/{run_id}/weights/{version}",
        content=json.dumps(document),
        headers={**AUTH, "content-type": "application/json"},
    )


def check_refused(proxy: ServiceProcess, run_id: str, document: object, detail: str) -> None:
    """Refused in these words, logged once, invisible, and the service is as before."""
    before = len(proxy.refusals())
    response = put(proxy, run_id, document)
    assert (response.status_code, response.json()["detail"]) == (422, detail)
    assert response.headers["content-type"] == "application/problem+json"
    assert proxy.refusals()[before:] == [detail[:500]]
    latest = proxy.http.get(f"/v1/runs/{run_id}/weights/latest", headers=AUTH)
    assert latest.status_code == 404
    assert proxy.errors() == []
    proxy.check_is_up()


def file_with(header: object, data_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WHOLE = adapter_files(0)[ADAPTER_WEIGHTS]
HOSTILE_WEIGHTS = {
    "cut off": (
        WHOLE[:-100],
        "the adapter's tensors take 1792 bytes but the file holds 1692: it is cut off or has bytes "
        "to spare",
    ),
    "cut off in its header": (
        WHOLE[:50],
        f"the adapter's header claims {int.from_bytes(WHOLE[:8], 'little')} bytes in a file of 50: "
        "the file is cut off or no safetensors",
    ),
    "a header of 10 GB": (
        (10 * 2**30).to_bytes(8, "little") + b"{}",
        "the adapter's header claims 10737418240 bytes in a file of 10: the file is cut off or no "
        "safetensors",
    ),
    "a negative offset": (
        file_with({A: entry([2, 2], -16, 0)}, 16),
        f"the adapter's header at '{A}.data_offsets.0': Input should be greater than or equal to 0",
    ),
    "tensors that overlap": (
        file_with({A: entry([2, 2], 0, 16), B: entry([2, 2], 8, 24)}, 24),
        "the adapter's tensors do not lie back to back: one of 16 bytes should begin at 16 but has "
        "offsets (8, 24)",
    ),
    "an offset past the end": (
        file_with({A: entry([2, 2], 0, 2**62)}, 16),
        "the adapter's tensors do not lie back to back: one of 16 bytes should begin at 0 but has "
        "offsets (0, 4611686018427387904)",
    ),
    "another type": (
        save({A: np.zeros((2, 3), np.int8), B: np.zeros((3, 2), np.int8)}),
        f"the adapter's header at '{A}.dtype': Input should be 'F64', 'F32', 'F16' or 'BF16'",
    ),
    "another rank": (
        save({A: np.zeros((1, 3), np.float32), B: np.zeros((3, 1), np.float32)}),
        f"'{A}' has shape (1, 3), which does not fit rank 2: gather a sharded tensor before it is "
        "saved",
    ),
    "half a pair": (
        save({A: np.zeros((2, 3), np.float32)}),
        "the adapter has 1 A and 0 B factors: every module needs one of each",
    ),
    "another tensor": (
        save({**adapter_tensors(0), "lm_head.weight": np.zeros((2, 3), np.float32)}),
        "'lm_head.weight' is no LoRA factor: engines serve only `*.lora_A.weight` and "
        "`*.lora_B.weight`",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_WEIGHTS)
def test_hostile_weights_are_refused(
    proxy: ServiceProcess, store: S3ObjectStore, run_id: str, case: str
) -> None:
    weights, detail = HOSTILE_WEIGHTS[case]
    files = {ADAPTER_WEIGHTS: weights, ADAPTER_CONFIG: adapter_config(2)}
    manifest = upload(store, run_id, 0, files)
    check_refused(proxy, run_id, manifest.model_dump(mode="json"), detail)


def with_file(manifest: Manifest, **changes: object) -> dict[str, Any]:
    """The manifest with another first file."""
    document = manifest.model_dump(mode="json")
    document["files"][0].update(changes)
    return document


def with_changes(**changes: object) -> Callable[[Manifest], dict[str, Any]]:
    return lambda manifest: {**manifest.model_dump(mode="json"), **changes}


NAME = "String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$'"
HOSTILE_MANIFESTS: dict[str, tuple[Callable[[Manifest], object], str]] = {
    "10 GB declared": (
        lambda manifest: with_file(manifest, size_bytes=10 * 2**30),
        "body.files.0.size_bytes: Input should be less than or equal to 4294967296",
    ),
    "a file above its folder": (
        lambda manifest: with_file(manifest, name="../../manifests/000000.json"),
        f"body.files.0.name: {NAME}",
    ),
    "a job above its folder": (with_changes(job_id=".."), f"body.job_id: {NAME}"),
    "another prefix": (
        with_changes(prefix="runs/other/versions/000000-job-x-1/"),
        "prefix is 'runs/other/versions/000000-job-x-1/', but this attempt writes under "
        "'runs/RUN/versions/000000-job-x-1/'",
    ),
    "a prefix that climbs": (
        with_changes(prefix="runs/x/versions/../../other/"),
        "body.prefix: String should match pattern '^runs/[^/]+/versions/[^/]+/$'",
    ),
    "a configuration of 2 MB": (
        lambda manifest: with_file(
            manifest.model_copy(update={"files": manifest.files[::-1]}), size_bytes=2**21
        ),
        "files: adapter_config.json may have 1048576 bytes: every generator reads it",
    ),
    "half a character": (
        with_changes(base_model="\ud800"),
        "base_model: has a NUL character or half of a character",
    ),
    "an infinite scale": (with_changes(alpha=float("inf")), "alpha: must be a finite number"),
    "a rank without end": (with_changes(rank=10**30), "rank: the number is too large"),
    "no object": (
        lambda _: [1, 2],
        "body: Input should be a valid dictionary or object to extract fields from",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_MANIFESTS)
def test_hostile_manifests_are_refused(
    proxy: ServiceProcess, store: S3ObjectStore, run_id: str, case: str
) -> None:
    change, detail = HOSTILE_MANIFESTS[case]
    files = {name: body for name, body in adapter_files(0).items() if name != "trainer_state.json"}
    document = change(upload(store, run_id, 0, files))
    check_refused(proxy, run_id, document, detail.replace("RUN", run_id))


@pytest.mark.parametrize("version", ["../0", "%2e%2e%2f0", "-1", "1e3", "9" * 30, "0%00"])
def test_a_version_is_a_number(proxy: ServiceProcess, run_id: str, version: str) -> None:
    assert put(proxy, run_id, {}, version).status_code in (404, 405, 422)
    proxy.check_is_up()


def test_a_body_that_declares_10_gb_is_refused_at_once(proxy: ServiceProcess) -> None:
    before = len(proxy.refusals())
    head = "PUT /v1/runs/run-x/weights/0 HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"authorization: Bearer {WORKER_TOKEN}\r\ncontent-length: {10 * 2**30}\r\n\r\n"
    detail = (
        "the body is larger than 1048576 bytes: send less, or put data in the object store and "
        "send its address"
    )
    assert proxy.refusal_of(head) == (413, detail)
    assert proxy.refusals()[before:] == [detail]


def test_what_was_refused_left_nothing_in_the_cache(
    proxy: ServiceProcess, store: S3ObjectStore, run_id: str
) -> None:
    """The bytes of an object that is not what its manifest says are not kept."""
    manifest = upload(store, run_id, 0, adapter_files(0))
    wrong = hashlib.sha256(b"other").hexdigest()
    response = put(proxy, run_id, with_file(manifest, sha256=wrong))
    assert response.status_code == 422
    assert not (proxy.log.parent / "cache" / wrong).exists()
    # The other file may be on its way still.
    wait_until(lambda: not list((proxy.log.parent / "cache").glob("*.part")))
