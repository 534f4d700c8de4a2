"""How many requests a key may send, and an address without one: sliding windows, in this process or
shared in Redis."""

import math
import time
from pathlib import Path

import structlog
from limits import RateLimitItem, parse
from limits.errors import StorageError
from limits.storage import storage_from_string
from limits.strategies import SlidingWindowCounterRateLimiter

from offbeat.errors import RateLimitedError
from offbeat.queue import redis_tls

log = structlog.get_logger(__name__)

STRANGER_RATE = "100/minute"
"""Answers with 401 that one address gets: far more than mistakes need. A key cannot be guessed in
any number of them; the bound is on what trying it costs the service and its log."""
REDIS_TIMEOUT_S = 1.0
"""Every request waits for the count; a Redis that is slower than this is taken for gone."""


class RateLimiter:
    """Refuses requests beyond a rate. Safe to share between threads."""

    def __init__(
        self,
        rate: str,
        storage_url: str = "memory://",
        ca_file: Path | None = None,
        *,
        stranger_rate: str = STRANGER_RATE,
    ) -> None:
        """Rates are like `100/minute`; `storage_url` is `memory://`, where each process counts for
        itself, or Redis's address, checked against the authority in `ca_file` with `rediss://`."""
        storage = storage_from_string(
            storage_url,
            wrap_exceptions=True,
            socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S,
            **redis_tls(storage_url, ca_file),
        )
        self._rate, self._stranger_rate = parse(rate), parse(stranger_rate)
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    def check(self, key_id: str) -> None:
        """Count a request of the key. Raises `RateLimitedError` where it is one too many."""
        self._check(
            self._rate,
            key_id,
            f"this key may send {self._rate}: send fewer requests, or wait as Retry-After says",
        )

    def check_stranger(self, address: str) -> None:
        """Count a request without a valid key. Raises `RateLimitedError` where the address has sent
        too many of them."""
        self._check(
            self._stranger_rate,
            f"address {address}",
            f"this address may send {self._stranger_rate} without a valid key: send one as "
            "`Authorization: Bearer <key>`",
        )

    def _check(self, rate: RateLimitItem, who: str, mending: str) -> None:
        try:
            if self._limiter.hit(rate, who):
                return
            reset_at = self._limiter.get_window_stats(rate, who).reset_time
        except StorageError as error:
            # The limit protects the service; it must not become another way for it to be down.
            log.warning("The rate limit cannot be counted.", error=str(error.storage_error))
            return
        raise RateLimitedError(mending, max(1, math.ceil(reset_at - time.time())))
