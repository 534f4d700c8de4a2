"""The broker: queue names, the Celery application, and enqueueing by task name.

The queue is shallow and disposable. A message is an id and an attempt; whether the job may run is
asked of the orchestrator, so a message that comes twice, late or never changes nothing but time.
"""

import json
from pathlib import Path

from celery import Celery

from offbeat.contracts.jobs import JobKind, JobMessage, WorkerRole
from offbeat.settings import QueueSettings

TASK_NAME = "offbeat.run_job"
MESSAGE_BYTES_MAX = 4096

QUEUE_PREFIXES = {WorkerRole.GENERATOR: "generate", WorkerRole.TRAINER: "train"}


def queue_name(role: WorkerRole, pool: str) -> str:
    """`generate.<pool>` or `train.<pool>`."""
    return f"{QUEUE_PREFIXES[role]}.{pool}"


def create_celery(settings: QueueSettings, name: str) -> Celery:
    """A Celery application for a producer or a worker; nothing connects yet.

    One message at a time, acknowledged after the job's completion was accepted, and re-delivered
    when the process dies. No result backend: answers travel over HTTP.
    """
    app = Celery(name, broker=settings.redis_url.get_secret_value())
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_use_ssl=redis_tls(settings.redis_url.get_secret_value(), settings.redis_ca_file)
        or None,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": settings.visibility_timeout_s,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 15,
        },
    )
    return app


def redis_tls(url: str, ca_file: Path | None) -> dict[str, str]:
    """What a Redis client needs to check the server's certificate; nothing without TLS."""
    if not url.startswith("rediss://"):
        return {}
    authority = {"ssl_ca_certs": str(ca_file)} if ca_file else {}
    return {"ssl_cert_reqs": "required", **authority}


def enqueue(app: Celery, kind: JobKind, pool: str, message: JobMessage) -> None:
    """Put a message on its queue. Raises kombu's OperationalError when the broker does not
    answer."""
    body = message.model_dump()
    size = len(json.dumps(body))
    assert size < MESSAGE_BYTES_MAX, f"a queue message of {size} bytes carries more than references"
    app.send_task(TASK_NAME, kwargs=body, queue=queue_name(kind.role, pool), retry=False)
