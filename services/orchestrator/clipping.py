"""A policy that has unlearned to end its completions: the run's log says so."""

from collections.abc import Sequence

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from offbeat.contracts.runs import EventLevel
from services.orchestrator.schema import MetricRow
from services.orchestrator.store import add_event

CLIPPED_RATIO = "completions/clipped_ratio"
CLIPPED_RATIO_MAX = 0.9
STEPS = 5
"""In a row; a single batch may be hard."""
RATIOS = (
    select(MetricRow.value)
    .where(
        MetricRow.run_id == bindparam("run_id"),
        MetricRow.name == CLIPPED_RATIO,
        MetricRow.step.between(bindparam("first"), bindparam("last")),
    )
    .order_by(MetricRow.step)
)


def has_set_in(ratios: Sequence[float]) -> bool:
    """Whether the newest `STEPS` steps are over the limit, and the one before them, if there was
    one, is not. The ratios are those of a run's newest steps in order."""
    newest, before = ratios[-STEPS:], ratios[:-STEPS][-1:]
    is_over = [ratio > CLIPPED_RATIO_MAX for ratio in newest]
    return len(newest) == STEPS and all(is_over) and all(r <= CLIPPED_RATIO_MAX for r in before)


def report_clipping(session: Session, run_id: str, step: int, now: float) -> None:
    """Say once for each time that it sets in. The run goes on: its budget may be small on
    purpose."""
    newest = {"run_id": run_id, "first": step - STEPS, "last": step}
    ratios = session.scalars(RATIOS, newest).all()
    if not has_set_in(ratios):
        return
    add_event(
        session,
        run_id,
        now,
        "completions_clipped",
        f"In {STEPS} steps in a row more than {CLIPPED_RATIO_MAX:.0%} of the completions were cut "
        "off: raise rollout.max_new_tokens or, if they ended by themselves before, lower "
        "train.learning_rate or lora.alpha.",
        level=EventLevel.WARNING,
        data={"step": step},
    )
