"""`python -m services.orchestrator`: reads the environment, brings the database up to date,
serves."""

import time

import structlog
import uvicorn

from offbeat.logs import configure_logs
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery
from offbeat.settings import ObjectStoreSettings, QueueSettings
from offbeat.web import bind_host
from services.orchestrator.app import create_app
from services.orchestrator.broker import CeleryBroker
from services.orchestrator.dependencies import Services
from services.orchestrator.migrate import migrate
from services.orchestrator.scheduler import Scheduler
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.store import Store

SHUTDOWN_GRACE_S = 5
"""Event streams never end by themselves, so they are cut after this long."""

log = structlog.get_logger(__name__)


def main() -> None:
    """Build everything once and serve until told to stop."""
    settings = OrchestratorSettings()
    configure_logs(settings, "orchestrator")
    url = settings.orchestrator_database_url.get_secret_value()
    store = Store.connect(url)
    migrate(store.engine)
    broker = CeleryBroker(create_celery(QueueSettings(), "orchestrator"))
    scheduler = Scheduler(store, broker, clock=time.time, message_lost_s=settings.message_lost_s)
    services = Services(
        store=store,
        objects=S3ObjectStore.connect(ObjectStoreSettings()),
        broker=broker,
        scheduler=scheduler,
        clock=time.time,
        api_key=settings.api_key,
        worker_token=settings.worker_token,
        lease_s=settings.lease_s,
        heartbeat_interval_s=settings.heartbeat_interval_s,
    )
    has_keys = settings.api_key is not None and settings.worker_token is not None
    host = bind_host(settings.host, has_keys=has_keys)
    log.info("The orchestrator is listening.", host=host, port=settings.orchestrator_port)
    uvicorn.run(
        create_app(services),
        host=host,
        port=settings.orchestrator_port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )


if __name__ == "__main__":
    main()
