"""As little of HTTP/1.1 as simulated workers need, on kept connections.

A usual client costs more CPU for a request than the service that answers it, and here both share
the cores.
"""

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

TIMEOUT_S = 60.0
WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a service says; the names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    content: bytes


class Connections:
    """Those of one worker to one service."""

    def __init__(self, base_url: str) -> None:
        address = urlsplit(base_url)
        self._host, self._port = address.hostname, address.port
        self._unused: list[Streams] = []

    async def request(self, method: str, target: str, body: bytes | None = None) -> Answer:
        """Send a request. `OSError` or `EOFError` where the service does not answer whole."""
        reader, writer = await self._connection()
        try:
            writer.write(self._head(method, target, body) + (body or b""))
            async with asyncio.timeout(TIMEOUT_S):
                answer = await _read(reader)
        except BaseException:
            writer.close()  # Nobody knows what comes next on it.
            raise
        if answer.headers.get("connection") == "close":
            writer.close()
        else:
            self._unused.append((reader, writer))
        return answer

    def close(self) -> None:
        """Close those that are not in use."""
        for _, writer in self._unused:
            writer.close()

    async def _connection(self) -> Streams:
        while self._unused:
            reader, writer = self._unused.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()  # The service has not heard of it for a while.
        return await asyncio.open_connection(self._host, self._port)

    def _head(self, method: str, target: str, body: bytes | None) -> bytes:
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._host}:{self._port}"]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode()


async def _read(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    status = int(first.split(" ", 2)[1])
    pairs = (line.split(":", 1) for line in lines)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    if status in WITHOUT_BODY:
        return Answer(status=status, headers=headers, content=b"")
    content = await reader.readexactly(int(headers["content-length"]))
    return Answer(status=status, headers=headers, content=content)
