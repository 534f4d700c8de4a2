"""How a service listens: address, TLS, and what it believes of a proxy in front of it."""

import gc

import structlog
import uvicorn
from fastapi import FastAPI

from offbeat.http_connections import BoundedConnection, connections_max
from offbeat.settings import ServerSettings
from offbeat.web import bind_host

log = structlog.get_logger(__name__)

KEEP_ALIVE_S = 30
"""An unused connection stays longer than workers keep theirs, so that a service does not close it
at the moment in which it is used again."""
SHUTDOWN_GRACE_S = 5
"""Event streams and long-polls never end by themselves, so they are cut after this long."""
GC_THRESHOLDS = (20_000, 20, 50)
"""A request makes a few hundred objects and hardly a cycle. With Python's own thresholds
(700, 10, 10) a fifth of a service's time went into looking for some."""


def serve(app: FastAPI, settings: ServerSettings, *, port: int, has_keys: bool) -> None:
    """Serve until told to stop."""
    host = bind_host(settings.host, has_keys=has_keys)
    log.info("The service is listening.", host=host, port=port, tls=bool(settings.tls_cert_file))
    _collect_rarely()
    uvicorn.run(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=BoundedConnection,
        ws="none",
        limit_concurrency=connections_max(),
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        root_path=settings.root_path,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )


def _collect_rarely() -> None:
    """Have the garbage collector pass over what was made before the first request."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
