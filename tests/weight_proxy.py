"""A weight-proxy on a free port: the real application under a real uvicorn, in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from pydantic import SecretStr

from offbeat.objects import S3ObjectStore
from offbeat.worker_api import WeightProxyClient
from services.weight_proxy.app import create_app
from services.weight_proxy.cache import FileCache
from services.weight_proxy.metrics import Metrics
from services.weight_proxy.proxy import WeightProxy
from services.weight_proxy.registry import Registry
from services.weight_proxy.waiters import WAITERS_MAX, Waiters
from tests.servers import serve

CACHE_BYTES_MAX = 2**24


@dataclass(frozen=True, kw_only=True)
class RunningProxy:
    """Where it listens, a client of it, and its parts."""

    url: str
    app: FastAPI
    client: WeightProxyClient
    parts: WeightProxy

    def metric(self, name: str) -> float:
        """A series of `/metrics`, without the service's prefix."""
        value = self.parts.metrics.registry.get_sample_value(f"offbeat_weight_proxy_{name}")
        assert value is not None
        return value


@contextmanager
def running_proxy(
    store: S3ObjectStore,
    folder: Path,
    *,
    database_url: str | None = None,
    token: SecretStr | None = None,
    waiters_max: int = WAITERS_MAX,
) -> Iterator[RunningProxy]:
    """Serve until the end of the block. Cache and, unless given, database lie in the folder."""
    registry = Registry.connect(database_url or f"sqlite:///{folder / 'versions.db'}")
    metrics = Metrics()
    parts = WeightProxy(
        registry=registry,
        store=store,
        cache=FileCache(folder / "cache", store, CACHE_BYTES_MAX, metrics.store_reads),
        waiters=Waiters(registry, metrics.waiters, waiters_max),
        metrics=metrics,
    )
    app = create_app(parts, token)
    with serve(app) as url:
        client = WeightProxyClient(url, token)
        try:
            yield RunningProxy(url=url, app=app, client=client, parts=parts)
        finally:
            client.close()
