"""Which waiting job goes to the broker."""

from offbeat.contracts.jobs import JobKind, WorkerRole
from services.orchestrator.dispatch import WaitingJob, choose

GENERATE = (WorkerRole.GENERATOR, "default")
TRAIN = (WorkerRole.TRAINER, "default")


def job(
    seq: int,
    run: str,
    kind: JobKind = JobKind.GENERATE,
    priority: int = 0,
    pool: str = "default",
    project: str = "p",
) -> WaitingJob:
    return WaitingJob(
        seq=seq,
        job_id=f"j{seq}",
        run_id=run,
        kind=kind,
        pool=pool,
        priority=priority,
        project_id=project,
    )


def test_the_queue_is_kept_as_deep_as_there_are_workers() -> None:
    waiting = [job(n, "a") for n in range(10)]
    chosen = choose(waiting, sent={GENERATE: 1}, workers={GENERATE: 3}, busy={})
    assert [item.job_id for item in chosen] == ["j0", "j1"]


def test_one_message_waits_for_the_first_worker() -> None:
    chosen = choose([job(1, "a"), job(2, "a")], sent={}, workers={}, busy={})
    assert [item.job_id for item in chosen] == ["j1"]


def test_runs_take_turns_whatever_they_have_waiting() -> None:
    waiting = [*(job(n, "long") for n in range(6)), job(6, "short"), job(7, "short")]
    chosen = choose(waiting, sent={}, workers={GENERATE: 4}, busy={})
    assert [item.run_id for item in chosen] == ["long", "short", "long", "short"]


def test_a_busy_run_waits_for_an_idle_one() -> None:
    chosen = choose([job(1, "a"), job(2, "b")], sent={}, workers={}, busy={"a": 3})
    assert [item.run_id for item in chosen] == ["b"]


def test_priority_goes_first() -> None:
    waiting = [job(1, "a"), job(2, "b", priority=5)]
    assert [i.run_id for i in choose(waiting, sent={}, workers={}, busy={"b": 9})] == ["b"]


def test_evaluation_goes_before_generation_within_a_run() -> None:
    waiting = [job(1, "a"), job(2, "a", JobKind.EVALUATE)]
    assert [i.job_id for i in choose(waiting, sent={}, workers={}, busy={})] == ["j2"]


def test_lanes_do_not_share_their_room() -> None:
    waiting = [job(1, "a"), job(2, "a", JobKind.TRAIN), job(3, "a", pool="other")]
    chosen = choose(waiting, sent={GENERATE: 5}, workers={TRAIN: 1}, busy={})
    assert {item.job_id for item in chosen} == {"j2", "j3"}


def test_a_project_at_its_limit_is_passed_over() -> None:
    waiting = [
        *(job(n, "a", project="full", priority=9) for n in range(2)),
        *(job(n, "b", project="nearly full") for n in range(2, 4)),
        job(4, "c", project="unlimited"),
    ]
    quotas = {"full": 0, "nearly full": 1}
    chosen = choose(waiting, sent={}, workers={GENERATE: 9}, busy={}, quotas=quotas)
    assert [item.job_id for item in chosen] == ["j2", "j4"]


def test_a_project_whose_limit_was_lowered_waits_until_it_is_below() -> None:
    assert choose([job(1, "a")], sent={}, workers={}, busy={}, quotas={"p": -3}) == []
