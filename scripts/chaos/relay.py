"""An HTTP relay between services that can do them harm, request by request.

It passes method, path, headers and body through as they are, so signatures stay valid. A `Rule`
sees each request and names what is to go wrong with it. Bodies are held whole: they are those of a
tiny model. With several upstreams the relay is a load balancer: requests take turns, and one that
cannot connect goes to the next.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import h11
import httpx

READ_BYTES = 65_536
HOP_HEADERS = frozenset({b"content-length", b"transfer-encoding", b"connection", b"keep-alive"})
"""Of an answer: those that belong to one connection."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rule may go by."""

    method: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Answer with this status instead of passing the request on."""

    status: HTTPStatus


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Spread the answer over so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Send half of the answer's body, then break the connection."""


@dataclass(frozen=True, kw_only=True)
class LoseRequest:
    """Break the connection before the request is passed on."""


@dataclass(frozen=True, kw_only=True)
class LoseReply:
    """Pass the request on, then break the connection instead of answering."""


Fault = Refuse | Slow | Cut | LoseRequest | LoseReply
Rule = Callable[[Request], Fault | None]


def harmless(_: Request) -> Fault | None:
    """The rule of a relay that only relays."""
    return None


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Relay:
    """Listens on one port of this machine, within a `with` block, and passes everything on."""

    def __init__(self) -> None:
        self.upstreams: Sequence[str] = ()
        """Base URLs; to be set before the first request."""
        self.rule: Rule = harmless
        self._port = 0
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._http = httpx.AsyncClient(timeout=None, trust_env=False)

    def __enter__(self) -> Self:
        self._thread.start()
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._do(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Where it listens, now or once it is open again."""
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Accept connections: at first on a port that is free, from then on always on that one."""
        self._do(self._open())

    def close(self) -> None:
        """Break all connections and refuse new ones, as a service does that is down."""
        self._do(self._close())

    def _do(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        tasks = [task for task in self._connections.values() if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        connection = h11.Connection(h11.SERVER)
        try:
            # Cancelled by `close`, which waits for the task.
            broken = (OSError, h11.ProtocolError, httpx.TransportError, asyncio.CancelledError)
            with suppress(*broken):
                while await self._relay_one(connection, reader, writer):
                    connection.start_next_cycle()
        finally:
            writer.transport.abort()
            del self._connections[writer]

    async def _relay_one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Serve one request; whether the connection can take another."""
        received = await _receive(connection, reader, writer)
        if received is None:
            return False
        head, body = received
        fault = self.rule(Request(method=head.method.decode(), path=head.target.decode()))
        if isinstance(fault, LoseRequest):
            return False
        if isinstance(fault, Refuse):
            answer = _Answer(status=fault.status, headers=[], body=_error_document(fault.status))
        else:
            answer = await self._forward(head, body)
        if isinstance(fault, LoseReply):
            return False
        await _send(connection, writer, head, answer, fault)
        return connection.our_state is h11.DONE

    async def _forward(self, head: h11.Request, body: bytes) -> _Answer:
        headers = [(name, value) for name, value in head.headers if name != b"expect"]
        for last in [False] * (len(self.upstreams) - 1) + [True]:
            self._turn += 1
            url = self.upstreams[self._turn % len(self.upstreams)] + head.target.decode()
            request = httpx.Request(head.method.decode(), url, headers=headers, content=body)
            try:
                answer = await self._http.send(request, stream=True)
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            except httpx.ConnectError:
                if last:
                    raise
                continue
            await answer.aclose()
            pairs = [(name.lower(), value) for name, value in answer.headers.raw]
            return _Answer(status=answer.status_code, headers=pairs, body=raw)
        raise AssertionError("the last upstream answers or raises")


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[h11.Request, bytes] | None:
    """A whole request; None where the other side has gone."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=HTTPStatus.CONTINUE, headers=[])
                writer.write(connection.send(go_on))
            connection.receive_data(await reader.read(READ_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and head is not None:
            return head, bytes(body)
        else:
            return None


async def _send(
    connection: h11.Connection,
    writer: asyncio.StreamWriter,
    head: h11.Request,
    answer: _Answer,
    fault: Fault | None,
) -> None:
    """Answer the request, slowly or by half where the fault says so."""
    has_body = head.method != b"HEAD"
    size = str(len(answer.body)).encode()
    kept = [(name, value) for name, value in answer.headers if name not in HOP_HEADERS]
    if not has_body:
        size = dict(answer.headers).get(b"content-length", size)
    headers = [*kept, (b"content-length", size)]
    pause_s = fault.seconds / 2 if isinstance(fault, Slow) else 0.0
    middle = len(answer.body) // 2
    await asyncio.sleep(pause_s)
    writer.write(connection.send(h11.Response(status_code=answer.status, headers=headers)))
    if has_body:
        writer.write(connection.send(h11.Data(data=answer.body[:middle])))
    await writer.drain()
    if isinstance(fault, Cut):
        return
    await asyncio.sleep(pause_s)
    if has_body:
        writer.write(connection.send(h11.Data(data=answer.body[middle:])))
    writer.write(connection.send(h11.EndOfMessage()))
    await writer.drain()


def _error_document(status: HTTPStatus) -> bytes:
    """What S3 says with an error."""
    code = "SlowDown" if status is HTTPStatus.SERVICE_UNAVAILABLE else "InternalError"
    return f"<Error><Code>{code}</Code><Message>{status.phrase}</Message></Error>".encode()
