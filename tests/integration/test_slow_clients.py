"""Clients that send a byte a second, or read nothing: each loses its connection in the end, and
nobody else waits for them."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Annotated

import httpx
import pytest
from fastapi import APIRouter, Body, FastAPI
from pydantic import JsonValue

from offbeat.http_connections import BoundedConnection
from offbeat.objects import S3ObjectStore
from offbeat.request_bodies import BODY_BYTES_MAX, HELD_BYTES_MAX, BodyLimit
from offbeat.strict_routes import StrictRoute
from offbeat.web import install_errors
from tests.orchestrator import running_orchestrator, submit
from tests.servers import serve
from tests.waiting import wait_until

STREAMS_MAX = 5
READ_S = 60.0
SENDS_MAX = 1000


class Hasty(BoundedConnection):
    patience_s = 1.0


@contextmanager
def served(
    *,
    bytes_max: int = BODY_BYTES_MAX,
    timeout_s: float = READ_S,
    held_bytes_max: int = HELD_BYTES_MAX,
) -> Iterator[str]:
    """A small service that echoes bodies, in a hurry."""
    app = FastAPI()
    install_errors(app)
    app.add_middleware(
        BodyLimit, bytes_max=bytes_max, timeout_s=timeout_s, held_bytes_max=held_bytes_max
    )
    router = APIRouter(route_class=StrictRoute)

    @router.post("/echo")
    def echo(body: Annotated[JsonValue, Body()]) -> JsonValue:
        return body

    app.include_router(router)
    with serve(app, connection=Hasty) as url:
        yield url


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=READ_S)


def check_answers(url: str) -> None:
    """The service is there for others. A hasty one may also lose a client that is slow by
    accident, which then asks again."""

    def answers() -> bool:
        try:
            response = httpx.post(f"{url}/echo", json=[1], timeout=READ_S)
        except httpx.TransportError:
            return False
        assert response.json() == [1]
        return True

    wait_until(answers)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    found = b""
    try:
        while piece := connection.recv(2**16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def trickle(connection: socket.socket, piece: bytes) -> int:
    """Send a piece now and then until the connection is lost; how many went through."""
    connection.settimeout(0.05)
    for number in range(SENDS_MAX):
        try:
            connection.sendall(piece)
            if not connection.recv(1):
                return number
        except TimeoutError:
            continue
        except OSError:
            return number
    return SENDS_MAX


HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("sent", [b"", b"P", HEAD])
def test_headers_that_do_not_end_lose_the_connection(sent: bytes) -> None:
    with served() as url, connect(url) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""
        check_answers(url)


def test_a_byte_of_a_header_now_and_then_does_not_help() -> None:
    with served() as url, connect(url) as connection:
        connection.sendall(HEAD)
        assert trickle(connection, b"x") < SENDS_MAX


def test_headers_without_end_are_refused() -> None:
    with served() as url, connect(url) as connection:
        connection.sendall(HEAD + b"x: " + b"y" * (2**14 - len(HEAD) - 2))
        answer = read_all(connection).decode()
        assert answer.startswith("HTTP/1.1 400 Bad Request")
        assert answer.endswith("The headers are larger than 16384 bytes.")
        check_answers(url)


def test_a_body_that_does_not_come_gets_408_and_then_loses_the_connection() -> None:
    with served(timeout_s=0.3) as url, connect(url) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n[")
        answer = read_all(connection).decode()
        assert answer.startswith("HTTP/1.1 408 ")
        assert "the body was not whole after 0.3 s: send it faster" in answer
        check_answers(url)


def test_chunks_without_end_get_413_and_then_lose_the_connection() -> None:
    """Whoever goes on sending after the answer is not read for long."""
    with served(bytes_max=1000) as url, connect(url) as connection:
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"3e8\r\n" + bytes(1000) + b"\r\n"
        connection.sendall(chunk + chunk)
        response = HTTPResponse(connection)
        response.begin()
        assert (response.status, json.loads(response.read())["detail"]) == (
            413,
            "the body is larger than 1000 bytes: send less, or put data in the object store and "
            "send its address",
        )
        assert trickle(connection, chunk) < SENDS_MAX
        check_answers(url)


def test_bodies_held_at_once_are_bounded() -> None:
    with (
        served(held_bytes_max=2000) as url,
        httpx.Client(base_url=url, timeout=READ_S) as http,
        ExitStack() as slow_ones,
    ):
        for _ in range(2):
            slow = slow_ones.enter_context(connect(url))
            slow.sendall(HEAD + b"content-length: 2000\r\n\r\n" + b"[" + b" " * 999)

        def answer() -> httpx.Response:
            return http.post("/echo", json=["x" * 100])

        wait_until(lambda: answer().status_code == 503)
        response = answer()
        assert response.headers["retry-after"] == "1"
        assert response.json()["detail"] == (
            "the service reads too many large bodies already: try again in a moment"
        )
        slow_ones.close()
        wait_until(lambda: answer().status_code == 200)


def test_more_streams_than_are_allowed_are_refused(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with (
        running_orchestrator(tmp_path, valkey_url, store, streams_max=STREAMS_MAX) as running,
        httpx.Client(base_url=running.url, timeout=READ_S) as http,
    ):
        run_id = submit(http)
        path = f"/v1/runs/{run_id}/events"
        headers = {"accept": "text/event-stream"}
        with ExitStack() as stack:
            open_streams = []  # httpx closes a stream whose iterator is let go
            for _ in range(STREAMS_MAX):
                stream = stack.enter_context(http.stream("GET", path, headers=headers))
                assert stream.status_code == 200
                open_streams.append(stream.iter_lines())
                next(open_streams[-1])
            refused = [http.get(path, headers=headers) for _ in range(3)]
            assert {(one.status_code, one.json()["detail"]) for one in refused} == {
                (
                    503,
                    "5 streams are open already: read pages, try again later, or add a replica",
                )
            }
            assert http.get(path).status_code == 200
        http.post(f"/v1/runs/{run_id}/cancel")
        wait_until(lambda: http.get(path, headers=headers).status_code == 200)
