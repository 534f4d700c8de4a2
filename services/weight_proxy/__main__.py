"""`python -m services.weight_proxy`: the composition root."""

import structlog

from offbeat.logs import configure_logs
from offbeat.objects import S3ObjectStore
from offbeat.serving import serve
from services.weight_proxy.app import create_app
from services.weight_proxy.cache import FileCache
from services.weight_proxy.metrics import Metrics
from services.weight_proxy.proxy import WeightProxy
from services.weight_proxy.registry import Registry
from services.weight_proxy.settings import WeightProxySettings
from services.weight_proxy.waiters import Waiters

log = structlog.get_logger(__name__)


def main() -> None:
    """Build the parts from the environment and serve until told to stop."""
    settings = WeightProxySettings()
    configure_logs(settings.log, "weight-proxy")
    proxy = build(settings)
    if proxy.registry.is_empty():
        num_versions = proxy.registry.rebuild(proxy.store)
        log.info("The table was empty and was filled from the store.", versions=num_versions)
    token = settings.server.worker_token
    app = create_app(proxy, token)
    serve(app, settings.server, port=settings.port, has_keys=token is not None)


def build(settings: WeightProxySettings) -> WeightProxy:
    """The real parts; the database must answer, the store need not yet."""
    store = S3ObjectStore.connect(settings.store)
    registry = Registry.connect(settings.database_url.get_secret_value())
    metrics = Metrics()
    return WeightProxy(
        registry=registry,
        store=store,
        cache=FileCache(settings.cache_dir, store, settings.cache_bytes_max, metrics.store_reads),
        waiters=Waiters(registry, metrics.waiters),
        metrics=metrics,
    )


if __name__ == "__main__":
    main()
