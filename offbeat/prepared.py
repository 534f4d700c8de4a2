"""What the first job of a run does in every kind of run: it watches its rows, and stores a table of
each split."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog

from offbeat import keys
from offbeat.contracts.jobs import PreparedData
from offbeat.contracts.leases import Lease
from offbeat.objects import S3ObjectStore
from offbeat.worker import JobContext

log = structlog.get_logger(__name__)

ROWS_PER_CHECK = 2000
"""Rows between two looks at the lease: some tenths of a second."""

T = TypeVar("T")


class RowWatch:
    """Looks at the lease and logs the progress once in `ROWS_PER_CHECK` rows."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._rows = 0

    def see(self) -> None:
        """Count one row that was read or rendered."""
        self._rows += 1
        if self._rows % ROWS_PER_CHECK == 0:
            self._context.check()
            log.info("Preparing the rows.", rows=self._rows)


def put_tables(
    store: S3ObjectStore,
    lease: Lease,
    train: Sequence[T],
    evaluation: Sequence[T],
    encode: Callable[[Sequence[T]], bytes],
) -> PreparedData:
    """Store the table of each split, the held-out one only where it has rows, and name them."""
    train_key = keys.prompts(lease.run_id, lease.job_id, lease.attempt, "train")
    body, eval_body, eval_key = encode(train), b"", None
    store.put(train_key, body)
    if evaluation:
        eval_key = keys.prompts(lease.run_id, lease.job_id, lease.attempt, "eval")
        eval_body = encode(evaluation)
        store.put(eval_key, eval_body)
    return PreparedData(
        prompts_key=train_key,
        num_prompts=len(train),
        eval_prompts_key=eval_key,
        num_eval_prompts=len(evaluation),
        stored_bytes=len(body) + len(eval_body),
    )
