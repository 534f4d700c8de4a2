"""Why a run is as fast as it is: a verdict, and the numbers it rests on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.runs import Diagnosis, RunStatus

TRAINER_BOUND_FRACTION = 0.9
"""A trainer that is busy for so much of the time is what the run waits for."""


@dataclass(frozen=True, kw_only=True)
class TrainSpan:
    """The times of one train job, in seconds since the epoch."""

    created_at: float
    """All its groups were ready and the step before was computed."""
    leased_at: float
    computed_at: float
    """From here on the trainer was free for the next step."""


@dataclass(frozen=True, kw_only=True)
class TrainerUse:
    """How a run used its trainer between its first step and its last."""

    busy_fraction: float
    idle_while_ready_fraction: float
    """Share of the time in which a step could have been under way and was not."""


def trainer_use(spans: Sequence[TrainSpan]) -> TrainerUse | None:
    """None before the first step is done. The spans are in order."""
    if not spans:
        return None
    total = spans[-1].computed_at - spans[0].created_at
    if total <= 0:
        return None
    busy = sum(span.computed_at - span.leased_at for span in spans)
    idle = sum(span.leased_at - span.created_at for span in spans)
    return TrainerUse(busy_fraction=busy / total, idle_while_ready_fraction=idle / total)


def diagnose(
    *,
    status: RunStatus,
    status_reason: str | None,
    roles: Collection[WorkerRole],
    generators: int,
    trainers: int,
    pool: str,
    use: TrainerUse | None,
    dropped_groups: int,
    generated_tokens: int,
    generation_failures: int,
    outage_s: float | None,
) -> Diagnosis:
    """Say in a sentence what the run waits for."""
    details: dict[str, JsonValue] = {
        "generators_alive": generators,
        "trainers_alive": trainers,
        "trainer_busy_fraction": use.busy_fraction if use else None,
        "trainer_idle_fraction": use.idle_while_ready_fraction if use else None,
        "dropped_groups": dropped_groups,
        "generated_tokens": generated_tokens,
        "generation_failures_in_a_row": generation_failures,
        "outage_s": outage_s,
    }
    return Diagnosis(
        verdict=_verdict(status, status_reason, roles, generators, trainers, pool, use, outage_s),
        details=details,
    )


def _verdict(
    status: RunStatus,
    reason: str | None,
    roles: Collection[WorkerRole],
    generators: int,
    trainers: int,
    pool: str,
    use: TrainerUse | None,
    outage_s: float | None,
) -> str:
    if status is not RunStatus.RUNNING:
        return f"The run is {status}{f': {reason}' if reason else ''}."
    if WorkerRole.GENERATOR in roles and not generators:
        return _nobody("generator", pool)
    if not trainers:
        return _nobody("trainer", pool)
    if outage_s is not None:
        return (
            f"Jobs have waited for {outage_s:.0f} s until a part that they need is back: the event "
            "outage_began says which. No attempt counts as failed meanwhile."
        )
    if use is None:
        return "The run is being set up: no step is done yet."
    if WorkerRole.GENERATOR not in roles or use.busy_fraction >= TRAINER_BOUND_FRACTION:
        return "Trainer-bound: more generators would not make the run faster."
    return "Generation-bound: more or faster generators would make the run faster."


def _nobody(role: str, pool: str) -> str:
    return (
        f"No {role} of pool {pool!r} takes jobs: start one, or see in `offbeat workers` which are "
        "lost or in quarantine."
    )
