"""Applications behind a real uvicorn, in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from offbeat.http_connections import BoundedConnection
from tests.waiting import wait_until


@contextmanager
def serve(
    app: ASGIApp, port: int = 0, connection: type[BoundedConnection] = BoundedConnection
) -> Iterator[str]:
    """Serve the application on a free port (or the given one); the base URL."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        http=connection,
        log_config=None,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server ended before it listened"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
