"""Messages off the broker: one `BRPOP` at a time on a connection of its own, as kombu does it.

Redis's protocol is spoken here because a wait must be cheap, and end when it is cancelled.
"""

import asyncio
import base64
import json
from urllib.parse import urlsplit

from offbeat.contracts.jobs import JobMessage

WAIT_S = 1
"""One wait for a message, as long as kombu's."""


class MessageQueue:
    """The messages of one queue, for one worker."""

    def __init__(self, broker_url: str, name: str) -> None:
        address = urlsplit(broker_url)
        self._host, self._port = address.hostname, address.port
        parts = (b"BRPOP", name.encode(), str(WAIT_S).encode())
        self._command = b"*%d\r\n" % len(parts) + b"".join(
            b"$%d\r\n%s\r\n" % (len(part), part) for part in parts
        )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def take(self) -> JobMessage:
        """The next message, taken off at once."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        while True:
            writer.write(self._command)
            kind = await reader.readline()
            if kind == b"*-1\r\n":
                continue
            assert kind == b"*2\r\n", f"the broker answers {kind!r}"
            await _string(reader)
            return message_of(await _string(reader))

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()


def message_of(body: bytes) -> JobMessage:
    """The message in what Celery puts on a queue."""
    _, arguments, _ = json.loads(base64.b64decode(json.loads(body)["body"]))
    return JobMessage.model_validate(arguments)


async def _string(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]
