"""Bodies that are too long, and a flood of large ones: refused early, and forgotten."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat

import httpx

from offbeat.request_bodies import BODY_BYTES_MAX
from scripts.bench.scale_meter import rss_bytes
from tests.service_process import API_KEY, JSON, ServiceProcess
from tests.specs import spec_dict

TOO_LARGE = (
    "the body is larger than 16777216 bytes: send less, or put data in the object store and send "
    "its address"
)
NO_KEY = "send a valid key as `Authorization: Bearer <key>`"
FLOOD = 200
FLOOD_THREADS = 4
WARM_UP = 16
"""Requests after which the process has all the memory that it needs for its work."""
MEBI = 2**20
GROWTH_BYTES_MAX = 64 * MEBI
"""An eighth of what is sent, which is several times as large once it is parsed."""
DECLARED = f"content-type: application/json\r\ncontent-length: {10 * 2**30}\r\n\r\n"


def post(service: ServiceProcess, body: bytes | Iterator[bytes]) -> httpx.Response:
    return service.http.post("/v1/runs", content=body, headers=JSON)


def test_a_body_that_declares_10_gb_is_refused_at_once(
    orchestrator_process: ServiceProcess,
) -> None:
    before = len(orchestrator_process.refusals())
    head = f"POST /v1/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
    assert orchestrator_process.refusal_of(head + DECLARED) == (413, TOO_LARGE)
    assert orchestrator_process.refusals()[before:] == [TOO_LARGE]
    orchestrator_process.check_is_up()


def test_nothing_is_read_for_a_caller_without_a_key(orchestrator_process: ServiceProcess) -> None:
    request = f"POST /v1/runs HTTP/1.1\r\nhost: x\r\n{DECLARED}"
    assert orchestrator_process.refusal_of(request) == (401, NO_KEY)
    assert orchestrator_process.refusals()[-1] == NO_KEY


def test_a_body_over_the_limit_is_refused_however_it_is_sent(
    orchestrator_process: ServiceProcess,
) -> None:
    before = len(orchestrator_process.refusals())
    bodies = (bytes(BODY_BYTES_MAX + 1), repeat(bytes(MEBI), BODY_BYTES_MAX // MEBI + 1))
    answers = [post(orchestrator_process, body) for body in bodies]
    assert [(a.status_code, a.json()["detail"]) for a in answers] == [(413, TOO_LARGE)] * 2
    assert orchestrator_process.refusals()[before:] == [TOO_LARGE] * 2
    orchestrator_process.check_is_up()


def hostile_bodies() -> Iterator[bytes]:
    """Large ones of every kind, again and again."""
    kinds = [
        b'{"name": "' + b"x" * 2 * MEBI + b'"}',
        b"[" * MEBI,
        b'{"a": [' + b"{}," * (MEBI // 3) + b"1]}",
        b'"' + b'\\"' * (MEBI // 2),
        json.dumps(spec_dict(name="!", data={"rows": [{"prompt": "x" * 1000}] * 1000})).encode(),
        b"\xff" * MEBI,
    ]
    return chain.from_iterable(repeat([*kinds, *kinds, bytes(BODY_BYTES_MAX + 1)]))


def test_a_flood_of_large_bodies_leaves_the_memory_as_it_was(
    orchestrator_process: ServiceProcess,
) -> None:
    def send(body: bytes) -> int:
        return post(orchestrator_process, body).status_code

    bodies = hostile_bodies()
    with ThreadPoolExecutor(FLOOD_THREADS) as pool:
        warm_up = list(pool.map(send, islice(bodies, WARM_UP)))
        before = rss_bytes(orchestrator_process.pid)
        statuses = warm_up + list(pool.map(send, islice(bodies, FLOOD)))
        growth = rss_bytes(orchestrator_process.pid) - before
    assert set(statuses) == {413, 422}
    assert growth < GROWTH_BYTES_MAX
    assert orchestrator_process.errors() == []
    orchestrator_process.check_is_up()
