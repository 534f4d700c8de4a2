"""Certificates of a private authority, a TLS end in front of a plain port, and a reverse proxy."""

import socket
import socketserver
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHUNK_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """PEM files: of the authority, of a certificate for 127.0.0.1, and of its key."""

    authority: Path
    chain: Path
    key: Path

    def trust(self) -> ssl.SSLContext:
        """Of a client that believes this authority alone."""
        return ssl.create_default_context(cafile=self.authority)


def certificate(folder: Path) -> Certificate:
    """A new authority and what it vouches for."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    made = Certificate(
        authority=folder / "ca.pem", chain=folder / "cert.pem", key=folder / "key.pem"
    )
    authority.cert_pem.write_to_path(str(made.authority))
    issued.private_key_pem.write_to_path(str(made.key))
    for pem in issued.cert_chain_pems:
        pem.write_to_path(str(made.chain), append=True)
    return made


class _Relay(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, context: ssl.SSLContext, target_port: int) -> None:
        self.context = context
        self.target_port = target_port
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    """One client: bytes both ways until either side closes."""

    def handle(self) -> None:
        relay = cast(_Relay, self.server)
        plain = socket.create_connection(("127.0.0.1", relay.target_port))
        # A client that does not trust the certificate breaks off: that is what some tests show.
        with (
            suppress(OSError),
            plain,
            relay.context.wrap_socket(self.request, server_side=True) as secure,
        ):
            threading.Thread(target=_pump, args=(plain, secure), daemon=True).start()
            _pump(secure, plain)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def tls_in_front_of(port: int, certificate: Certificate) -> Iterator[int]:
    """A port that speaks TLS for one that does not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.chain, certificate.key)
    with _Relay(context, port) as relay:
        thread = threading.Thread(target=relay.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield relay.server_address[1]
        finally:
            relay.shutdown()
            thread.join()


def reverse_proxy(target: str, prefix: str) -> Starlette:
    """Shows the target below a prefix, as nginx and ingresses do: the prefix is taken away, the
    host stays, and `X-Forwarded-*` says what the client used."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=target, timeout=60) as client:
            app.state.client = client
            yield

    async def forward(request: Request) -> StreamingResponse:
        client: httpx.AsyncClient = request.app.state.client
        path = request.url.path.removeprefix(prefix)
        url = httpx.URL(path, query=request.url.query.encode())
        headers = {**request.headers, "x-forwarded-proto": "https", "x-forwarded-for": "192.0.2.1"}
        asked = client.build_request(
            request.method, url, headers=headers, content=await request.body()
        )
        answer = await client.send(asked, stream=True)
        return StreamingResponse(
            answer.aiter_raw(), status_code=answer.status_code, headers=dict(answer.headers)
        )

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    routes = [Route(f"{prefix}/{{path:path}}", forward, methods=methods)]
    return Starlette(routes=routes, lifespan=lifespan)
