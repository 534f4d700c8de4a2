"""How many requests a key may send: a sliding window a key, in this process or shared in Redis."""

import math
import time
from pathlib import Path

import structlog
from limits import parse
from limits.errors import StorageError
from limits.storage import storage_from_string
from limits.strategies import SlidingWindowCounterRateLimiter

from offbeat.errors import RateLimitedError
from offbeat.queue import redis_tls

log = structlog.get_logger(__name__)

REDIS_TIMEOUT_S = 1.0
"""Every request waits for the count; a Redis that is slower than this is taken for gone."""


class RateLimiter:
    """Refuses a key's requests beyond a rate. Safe to share between threads."""

    def __init__(
        self, rate: str, storage_url: str = "memory://", ca_file: Path | None = None
    ) -> None:
        """`rate` is like `100/minute`; `storage_url` is `memory://`, where each process counts for
        itself, or Redis's address, checked against the authority in `ca_file` with `rediss://`."""
        storage = storage_from_string(
            storage_url,
            wrap_exceptions=True,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            **redis_tls(storage_url, ca_file),
        )
        self._rate = parse(rate)
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    def check(self, key_id: str) -> None:
        """Count a request of the key. Raises `RateLimitedError` where it is one too many."""
        try:
            if self._limiter.hit(self._rate, key_id):
                return
            reset_at = self._limiter.get_window_stats(self._rate, key_id).reset_time
        except StorageError as error:
            # The limit protects the service; it must not become another way for it to be down.
            log.warning("The rate limit cannot be counted.", error=str(error.storage_error))
            return
        raise RateLimitedError(
            f"this key may send {self._rate}: send fewer requests, or wait as Retry-After says",
            max(1, math.ceil(reset_at - time.time())),
        )
