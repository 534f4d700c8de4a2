"""The broker as the scheduler sees it, where there is none."""

import pytest
from kombu.exceptions import OperationalError
from pydantic import SecretStr

from offbeat.contracts.jobs import JobKind, JobMessage, WorkerRole
from offbeat.queue import create_celery
from offbeat.settings import QueueSettings
from services.orchestrator.broker import CeleryBroker


def test_a_broker_that_does_not_answer_raises_the_error_that_the_scheduler_waits_out() -> None:
    settings = QueueSettings(redis_url=SecretStr("redis://127.0.0.1:1/0"))
    broker = CeleryBroker(create_celery(settings, "test"))
    with pytest.raises(OperationalError):
        broker.depth(WorkerRole.TRAINER, "default")
    with pytest.raises(OperationalError):
        broker.send(JobKind.TRAIN, "default", JobMessage(job_id="job-1", attempt=1))
