"""Which worker is to blame for what fails, and for how long it gets no jobs: pure.

A worker is judged by comparison, so that what would fail anywhere is held against nobody: a prompt
that crashes every engine, a reward that always raises, a store that does not answer, a run whose
every job fails. Its failures of one kind of work of one run count while others do the same work of
the same run well, in the same time. A worker that is alone is never judged: nobody would do better.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STRIKES_MAX = 3
"""Different pieces of work that a worker may fail at; one may be bad luck."""
OTHERS_SUCCESSES_MIN = 3
"""Successes of others that show that the work can be done."""
OTHERS_FAILURES_FRACTION_MAX = 0.2
"""Where others fail more often than this, it is the work and not the worker."""
OUTCOMES_KEPT_S = 3600.0
"""What happened longer ago is forgotten; longer than the longest quarantine, so that a worker that
comes back and fails once more is still known."""
FIRST_QUARANTINE_S = 30.0
"""As long as a driver's reset or a full disk's clean-up might take; each next one is twice that."""
QUARANTINE_MAX_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one attempt at a piece of work ended."""

    worker_id: str
    run_id: str
    work: str
    """A kind of job, or `serve`: to load and prove a version."""
    subject: str
    """The job or the version. The same subject twice is one piece of evidence."""
    at: float
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """A worker gets no jobs for a while."""

    until: float
    reason: str
    run_ids: tuple[str, ...]
    """The runs that it failed at."""


@dataclass(frozen=True, kw_only=True)
class _Streak:
    """What a worker failed at since it last did the same kind of work of the same run well."""

    run_id: str
    work: str
    since: float
    subjects: frozenset[str]


def judge(
    worker_id: str, outcomes: Sequence[Outcome], *, quarantines: int, now: float
) -> Quarantine | None:
    """What follows from the newest outcome of the worker, a failure.

    `outcomes` are those of all workers, oldest first; `quarantines` is how many the worker has had
    since it last did something well.
    """
    blamed = [s for s in _streaks(worker_id, outcomes) if _others_do_well(worker_id, s, outcomes)]
    newest = next(o for o in reversed(outcomes) if o.worker_id == worker_id)
    is_new = any(newest.subject in streak.subjects for streak in blamed)
    strikes = sum(len(streak.subjects) for streak in blamed)
    if not is_new or strikes < STRIKES_MAX:
        return None
    works = ", ".join(sorted({streak.work for streak in blamed}))
    return Quarantine(
        until=now + min(FIRST_QUARANTINE_S * 2**quarantines, QUARANTINE_MAX_S),
        reason=f"it failed {strikes} times in a row ({works}) at what others do well",
        run_ids=tuple(sorted({streak.run_id for streak in blamed})),
    )


def _streaks(worker_id: str, outcomes: Sequence[Outcome]) -> Iterator[_Streak]:
    failed_elsewhere = {o.subject for o in outcomes if o.worker_id != worker_id and not o.ok}
    failures: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.worker_id != worker_id:
            continue
        streak = failures.setdefault((outcome.run_id, outcome.work), [])
        if outcome.ok:
            streak.clear()
        elif outcome.subject not in failed_elsewhere:
            streak.append(outcome)
    for (run_id, work), streak in failures.items():
        if streak:
            subjects = frozenset(outcome.subject for outcome in streak)
            yield _Streak(run_id=run_id, work=work, since=streak[0].at, subjects=subjects)


def _others_do_well(worker_id: str, streak: _Streak, outcomes: Sequence[Outcome]) -> bool:
    others = [
        outcome.ok
        for outcome in outcomes
        if outcome.worker_id != worker_id
        and (outcome.run_id, outcome.work) == (streak.run_id, streak.work)
        and outcome.at >= streak.since
    ]
    successes = sum(others)
    failures = len(others) - successes
    return successes >= OTHERS_SUCCESSES_MIN and failures <= OTHERS_FAILURES_FRACTION_MAX * len(
        others
    )
