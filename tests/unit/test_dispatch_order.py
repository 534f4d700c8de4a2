"""The order of dispatch is that of looking through all waiting jobs for each message."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from offbeat.contracts.jobs import JobKind, WorkerRole
from services.orchestrator.dispatch import KIND_ORDER, Lane, WaitingJob, choose
from services.orchestrator.fairness import NO_LENGTH_S

RUNS = ("a", "b", "c", "d")
POOLS = {"a": "x", "b": "x", "c": "x", "d": "y"}
PROJECTS = {"a": "p", "b": "q", "c": "q", "d": "p"}
PRIORITIES = {"a": 0, "b": 0, "c": 1, "d": 0}


def slowly_chosen(
    waiting: Sequence[WaitingJob],
    room: dict[Lane, int],
    busy: dict[str, int],
    quotas: dict[str, int],
    served_s: dict[tuple[str, WorkerRole], float],
    lengths_s: dict[tuple[str, WorkerRole], float],
) -> list[str]:
    """The definition: the best of all that may go, again and again."""
    shares, clocks = Counter(busy), defaultdict(float, served_s)
    room, quota, left = dict(room), dict(quotas), list(waiting)
    chosen: list[str] = []
    while True:
        may_go = [job for job in left if room[job.lane] > 0 and quota[job.project_id] > 0]
        if not may_go:
            return chosen
        job = min(
            may_go,
            key=lambda job: (
                -job.priority,
                clocks[job.share],
                shares[job.run_id],
                KIND_ORDER.index(job.kind),
                job.seq,
            ),
        )
        left.remove(job)
        chosen.append(job.job_id)
        room[job.lane] -= 1
        shares[job.run_id] += 1
        clocks[job.share] += lengths_s.get(job.share, NO_LENGTH_S)
        quota[job.project_id] -= 1


seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])
shares = st.tuples(st.sampled_from(RUNS), st.sampled_from(list(WorkerRole)))


@given(
    jobs=st.lists(st.tuples(st.sampled_from(RUNS), st.sampled_from(KIND_ORDER)), max_size=25),
    workers=st.integers(0, 6),
    sent=st.integers(0, 3),
    busy=st.dictionaries(st.sampled_from(RUNS), st.integers(0, 4)),
    quotas=st.fixed_dictionaries({"p": st.integers(-1, 9), "q": st.integers(-1, 9)}),
    served_s=st.dictionaries(shares, seconds),
    lengths_s=st.dictionaries(shares, seconds),
)
def test_each_message_goes_to_the_best_of_all_jobs_that_may_go(
    jobs: list[tuple[str, JobKind]],
    workers: int,
    sent: int,
    busy: dict[str, int],
    quotas: dict[str, int],
    served_s: dict[tuple[str, WorkerRole], float],
    lengths_s: dict[tuple[str, WorkerRole], float],
) -> None:
    waiting = [
        WaitingJob(
            seq=seq,
            job_id=f"j{seq}",
            run_id=run,
            kind=kind,
            pool=POOLS[run],
            priority=PRIORITIES[run],
            project_id=PROJECTS[run],
        )
        for seq, (run, kind) in enumerate(jobs)
    ]
    lanes: list[Lane] = [(role, pool) for role in WorkerRole for pool in ("x", "y")]
    chosen = choose(
        waiting,
        sent=dict.fromkeys(lanes, sent),
        workers=dict.fromkeys(lanes, workers),
        busy=busy,
        quotas=quotas,
        served_s=served_s,
        lengths_s=lengths_s,
    )
    room = dict.fromkeys(lanes, max(1, workers) - sent)
    expected = slowly_chosen(waiting, room, busy, quotas, served_s, lengths_s)
    assert [job.job_id for job in chosen] == expected


def test_a_thousand_jobs_of_one_run_leave_in_their_order() -> None:
    waiting = [
        WaitingJob(
            seq=seq,
            job_id=f"j{seq}",
            run_id="a",
            kind=JobKind.GENERATE,
            pool="x",
            priority=0,
            project_id="p",
        )
        for seq in range(1000)
    ]
    chosen = choose(waiting, sent={}, workers={(WorkerRole.GENERATOR, "x"): 1000}, busy={})
    assert chosen == waiting
