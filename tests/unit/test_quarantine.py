"""Whose fault a failure is."""

from hypothesis import given
from hypothesis import strategies as st

from services.orchestrator.quarantine import Outcome, Quarantine, judge

NOW = 1000.0


def outcome(
    worker: str, subject: str, at: float, *, ok: bool, run: str = "a", work: str = "generate"
) -> Outcome:
    return Outcome(worker_id=worker, run_id=run, work=work, subject=subject, at=at, ok=ok)


def history(worker: str, prefix: str, *results: bool, run: str = "a") -> list[Outcome]:
    """One job after the other, a second apart, each of its own."""
    return [
        outcome(worker, f"{prefix}{number}", float(number), ok=ok, run=run)
        for number, ok in enumerate(results)
    ]


def verdict(*histories: list[Outcome], quarantines: int = 0) -> Quarantine | None:
    outcomes = sorted((o for part in histories for o in part), key=lambda o: o.at)
    return judge("bad", outcomes, quarantines=quarantines, now=NOW)


GOOD = history("good", "g", *[True] * 5)


def test_three_failures_where_others_do_well_are_a_quarantine() -> None:
    assert verdict(history("bad", "b", False, False), GOOD) is None
    assert verdict(history("bad", "b", False, False, False), GOOD) == Quarantine(
        until=1030.0,
        reason="it failed 3 times in a row (generate) at what others do well",
        run_ids=("a",),
    )


def test_each_quarantine_is_twice_as_long_up_to_a_quarter_of_an_hour() -> None:
    bad = history("bad", "b", False, False, False)
    found = [verdict(bad, GOOD, quarantines=number) for number in (0, 1, 4, 5, 9)]
    assert [q.until - NOW for q in found if q] == [30.0, 60.0, 480.0, 900.0, 900.0]


def test_a_worker_that_is_alone_is_not_judged() -> None:
    assert verdict(history("bad", "b", *[False] * 20)) is None


def test_a_run_whose_jobs_crash_everywhere_is_held_against_nobody() -> None:
    """Invariant 5: another run's rate of failure takes no worker away."""
    everywhere = history("good", "g", *[False] * 5)
    assert verdict(history("bad", "b", *[False] * 5), everywhere) is None
    other_run = history("good", "h", *[True] * 20, run="b")
    assert verdict(history("bad", "b", *[False] * 5), everywhere, other_run) is None


def test_a_job_that_fails_on_others_too_is_no_strike() -> None:
    bad = history("bad", "b", False, False, False)
    poison = [outcome("good", "b1", 4.5, ok=False)]
    assert verdict(bad, GOOD, poison) is None


def test_the_same_job_again_is_no_new_strike() -> None:
    again = [outcome("bad", "b0", float(n), ok=False) for n in range(5)]
    assert verdict(again, GOOD) is None


def test_a_success_ends_the_streak_of_its_own_run_only() -> None:
    failing = history("bad", "b", False, False, False)
    elsewhere = [outcome("bad", "c", 0.5, ok=True, run="b")]
    assert verdict(failing, elsewhere, GOOD) is not None
    recovered = history("bad", "b", False, False, True, False)
    assert verdict(recovered, GOOD) is None


def test_what_others_did_before_does_not_count() -> None:
    """An outage begins: all had succeeded, now nobody does."""
    late = [outcome("bad", f"b{n}", 10.0 + n, ok=False) for n in range(3)]
    assert verdict(late, GOOD) is None


def test_refused_versions_and_failed_jobs_add_up() -> None:
    refused = [outcome("bad", "v1", 0.0, ok=False, work="serve")]
    served = [outcome("good", f"v{n}", float(n), ok=True, work="serve") for n in range(1, 4)]
    found = verdict(refused, served, history("bad", "b", False, False), GOOD)
    assert found is not None
    assert found.reason == "it failed 3 times in a row (generate, serve) at what others do well"


def test_old_strikes_do_not_make_a_blameless_failure_one() -> None:
    """After a quarantine the worker fails at a run that fails everywhere."""
    poison_run = [outcome("bad", "p", 9.0, ok=False, run="poison")]
    assert verdict(history("bad", "b", False, False, False), GOOD, poison_run) is None


@given(st.lists(st.booleans(), max_size=40))
def test_who_fails_as_often_as_the_rest_is_never_judged(results: list[bool]) -> None:
    """All three do work of the same kind at the same times with the same results."""
    results = [*results, False]
    histories = [history(worker, worker, *results) for worker in ("bad", "good", "other")]
    assert verdict(*histories) is None
