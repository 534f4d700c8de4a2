"""Valkey: emptied, full, and messages that come twice or never."""

import time
from random import Random
from typing import cast

from offbeat.contracts.jobs import WorkerRole
from offbeat.queue import queue_name
from scripts.chaos.fleet import POOL, VALKEY, Fleet
from scripts.chaos.harm import OUTAGE_S, Harm
from scripts.chaos.process_harms import kill

MESSAGE_WAIT_S = 10
"""Within which a run that goes on sends another message."""


def _flush(fleet: Fleet, _: Random) -> float:
    fleet.broker.flushall()
    return time.time()


def _fill(fleet: Fleet, _: Random) -> float:
    """Writes are answered with an error, as `noeviction` wants it; reads are not."""
    fleet.broker.config_set("maxmemory", 1)
    struck_at = time.time()
    time.sleep(OUTAGE_S)
    fleet.broker.config_set("maxmemory", 0)
    return struck_at


def _take_message(fleet: Fleet) -> tuple[bytes, bytes] | None:
    """The next message, before any worker: who has waited longest for a list is served first."""
    queues = [queue_name(role, POOL) for role in WorkerRole]
    return cast("tuple[bytes, bytes] | None", fleet.broker.brpop(queues, timeout=MESSAGE_WAIT_S))


def _lose(fleet: Fleet, _: Random) -> float:
    _take_message(fleet)
    return time.time()


def _deliver_twice(fleet: Fleet, _: Random) -> float:
    if taken := _take_message(fleet):
        queue, message = taken
        fleet.broker.rpush(queue, message, message)
    return time.time()


BROKER_HARMS = (
    Harm(name="valkey killed, restarted empty", strike=kill(VALKEY)),
    Harm(name="valkey flushed", strike=_flush),
    Harm(name="valkey full", strike=_fill),
    Harm(name="message lost", strike=_lose),
    Harm(name="message delivered twice", strike=_deliver_twice),
)
