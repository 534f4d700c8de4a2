"""A step whose loss or gradient is not finite: skipped, set aside, and fatal when it keeps coming.

The version is made all the same, with its parent's weights, so that the run goes on with other
data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from offbeat import keys
from offbeat.contracts.jobs import StepInput
from offbeat.contracts.leases import Lease
from offbeat.contracts.weights import Manifest, SkippedStep
from offbeat.errors import NotFiniteError, PermanentJobError
from offbeat.objects import ObjectStore
from services.trainer.metrics import Metrics

log = structlog.get_logger(__name__)

S = TypeVar("S")

SKIPPED_IN_A_ROW_MAX = 2
"""A third one is no accident of the data."""


@dataclass(frozen=True, kw_only=True)
class Update(Generic[S]):
    """What a step makes of its parent's state."""

    state: S
    metrics: Metrics
    skipped: SkippedStep | None = None


def update_or_skip(
    store: ObjectStore,
    lease: Lease,
    step: StepInput,
    parent: Manifest,
    state: S,
    compute: Callable[[], tuple[S, Metrics]],
) -> Update[S]:
    """What `compute` makes, or the parent's state where that is not finite."""
    try:
        new_state, metrics = compute()
    except NotFiniteError as error:
        log.warning("Skipped a step.", version=step.base_version + 1, reason=error.detail)
        skipped = _skip_step(store, lease, step, parent, error)
        return Update(state=state, metrics={}, skipped=skipped)
    return Update(state=new_state, metrics=metrics)


def _skip_step(
    store: ObjectStore, lease: Lease, step: StepInput, parent: Manifest, error: NotFiniteError
) -> SkippedStep:
    """Set the batch aside. Raises `PermanentJobError` for the third skipped step in a row."""
    key = keys.skipped_batch(lease.run_id, step.base_version + 1, lease.job_id, lease.attempt)
    store.put(key, step.model_dump_json(indent=2).encode())
    in_a_row = (parent.skipped.in_a_row if parent.skipped else 0) + 1
    if in_a_row > SKIPPED_IN_A_ROW_MAX:
        raise PermanentJobError(
            f"{error.detail}, and {in_a_row - 1} steps before this one were no better: lower "
            f"train.learning_rate, or look at the batch in {key}"
        ) from error
    return SkippedStep(reason=error.detail, in_a_row=in_a_row, batch_key=key)
