"""How long a job waits for a part that is away."""

from services.orchestrator.outages import OUTAGE_MAX_S, wait_s


def test_a_job_waits_as_long_again_as_it_has_waited_within_bounds() -> None:
    assert [wait_s(away_s) for away_s in (0, 2, 4.5, 59, 300)] == [2, 2, 4.5, 59, 60]


def test_after_a_day_it_is_no_outage_any_more() -> None:
    assert (wait_s(OUTAGE_MAX_S), wait_s(OUTAGE_MAX_S + 1)) == (60, None)
