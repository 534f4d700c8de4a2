"""`python -m services.orchestrator`: reads the environment, brings the database up to date,
serves."""

import time

from offbeat.chat_channel import ChatListener
from offbeat.logs import configure_logs
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery
from offbeat.serving import serve
from offbeat.settings import ObjectStoreSettings, QueueSettings
from offbeat.worker_api import WeightProxyClient
from services.orchestrator.app import create_app
from services.orchestrator.broker import CeleryBroker
from services.orchestrator.collector import Collector
from services.orchestrator.connection import connection_of
from services.orchestrator.dependencies import Services
from services.orchestrator.leadership import leadership_over
from services.orchestrator.migrate import migrate
from services.orchestrator.rates import RateLimiter
from services.orchestrator.scheduler import Scheduler
from services.orchestrator.settings import OrchestratorSettings, WorkersSettings
from services.orchestrator.store import Store

UPTIME_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux has two clocks that nobody sets: its monotonic one stops while the machine sleeps."""


def uptime_s() -> float:
    """Since some moment, whatever is done to the time of day."""
    return time.clock_gettime(UPTIME_CLOCK)


def main() -> None:
    """Build everything once and serve until told to stop."""
    settings = OrchestratorSettings()
    configure_logs(settings, "orchestrator")
    url = settings.orchestrator_database_url.get_secret_value()
    store = Store.connect(url)
    migrate(store.engine)
    queue = QueueSettings()
    broker = CeleryBroker(create_celery(queue, "orchestrator"))
    scheduler = Scheduler(
        store,
        broker,
        leadership_over(store.engine),
        clock=time.time,
        uptime=uptime_s,
        lease_s=settings.lease_s,
        message_lost_s=settings.message_lost_s,
    )
    object_store = ObjectStoreSettings()
    objects = S3ObjectStore.connect(object_store)
    proxy = WeightProxyClient(
        settings.weight_proxy_url, settings.worker_token, ca_file=settings.ca_file
    )
    services = Services(
        store=store,
        objects=objects,
        broker=broker,
        scheduler=scheduler,
        clock=time.time,
        api_key=settings.api_key,
        worker_token=settings.worker_token,
        rates=RateLimiter(
            settings.rate_limit,
            settings.rate_limit_storage_url.get_secret_value(),
            queue.redis_ca_file,
        ),
        chats=ChatListener(queue),
        collector=Collector(
            store=store,
            objects=objects,
            forget_versions=proxy.forget,
            clock=time.time,
            interval_s=settings.gc_interval_s,
        ),
        connection=connection_of(WorkersSettings(), object_store, settings.weight_proxy_url),
        lease_s=settings.lease_s,
        heartbeat_interval_s=settings.heartbeat_interval_s,
    )
    has_keys = settings.api_key is not None and settings.worker_token is not None
    serve(create_app(services), settings, port=settings.orchestrator_port, has_keys=has_keys)


if __name__ == "__main__":
    main()
