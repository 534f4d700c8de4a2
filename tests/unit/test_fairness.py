"""Shares of workers: clocks, and what `dispatch.choose` makes of them in the long run."""

import random
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.contracts.jobs import JobKind, WorkerRole
from services.orchestrator.dispatch import WaitingJob, choose
from services.orchestrator.fairness import RunClock, moved_up, under_way_s


def clock(run: str, seconds: float | None, *, has_work: bool = True) -> RunClock:
    return RunClock(run_id=run, seconds=seconds, has_work=has_work)


def test_a_new_run_starts_where_the_others_are() -> None:
    assert moved_up([clock("old", 100.0), clock("older", 300.0), clock("new", None)]) == {
        "new": 100.0
    }
    assert moved_up([clock("first", None)]) == {"first": 0.0}


def test_a_run_without_work_saves_nothing_up() -> None:
    busy = clock("busy", 500.0)
    assert moved_up([busy, clock("idle", 20.0, has_work=False)]) == {"idle": 500.0}
    assert moved_up([busy, clock("ahead", 900.0, has_work=False)]) == {}


def test_a_new_run_does_not_catch_up_with_runs_that_pause_for_a_moment() -> None:
    assert moved_up([clock("old", 100.0, has_work=False), clock("new", None)]) == {"new": 100.0}


def test_a_run_that_waits_is_never_moved() -> None:
    assert moved_up([clock("starved", 1.0), clock("served", 99.0)]) == {}


def test_a_job_under_way_counts_as_long_as_it_takes_and_as_its_like_at_least() -> None:
    assert under_way_s(None, 3.0) == 3.0
    assert under_way_s(1.0, 3.0) == 3.0
    assert under_way_s(7.0, 3.0) == 7.0


@dataclass
class Farm:
    """Workers that always have work of every run: what each has got after a while."""

    lengths: dict[str, list[float]]
    """Of each run's jobs, over and over."""
    workers: int
    served: dict[str, float] = field(default_factory=dict)
    """Seconds of jobs that are over."""
    under_way: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Run and start of each job."""
    done: dict[str, list[float]] = field(default_factory=dict)

    def work(self, seconds: float) -> None:
        """Whenever a worker is free it takes what `choose` names."""
        self.served = dict.fromkeys(self.lengths, 0.0)
        self.done = {run: [] for run in self.lengths}
        taken = {run: count() for run in self.lengths}
        ends: list[tuple[float, int]] = []
        now, numbers = 0.0, count()
        while now < seconds:
            while len(self.under_way) < self.workers:
                number, run = next(numbers), self.next_run(now)
                length = self.lengths[run][next(taken[run]) % len(self.lengths[run])]
                self.under_way[number] = (run, now)
                heappush(ends, (now + length, number))
            now, number = heappop(ends)
            run, start = self.under_way.pop(number)
            self.served[run] += now - start
            self.done[run].append(now - start)

    def next_run(self, now: float) -> str:
        waiting = [
            WaitingJob(
                seq=seq,
                job_id=run,
                run_id=run,
                kind=JobKind.GENERATE,
                pool="default",
                priority=0,
                project_id="default",
            )
            for seq, run in enumerate(self.lengths)
        ]
        lengths_s = {
            (run, WorkerRole.GENERATOR): sum(done) / len(done)
            for run, done in self.done.items()
            if done
        }
        served_s = {(run, WorkerRole.GENERATOR): s for run, s in self.served.items()}
        for run, start in self.under_way.values():
            key = run, WorkerRole.GENERATOR
            served_s[key] += under_way_s(now - start, lengths_s.get(key, 1.0))
        (job,) = choose(
            waiting, sent={}, workers={}, busy={}, served_s=served_s, lengths_s=lengths_s
        )
        return job.run_id


LENGTHS = st.lists(st.floats(1.0, 50.0), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=2, max_size=4))
def test_runs_that_always_have_work_get_equal_seconds_of_one_worker(
    lengths: list[list[float]],
) -> None:
    """Within the length of one job, whatever the lengths are."""
    farm = Farm(lengths={f"run-{n}": own for n, own in enumerate(lengths)}, workers=1)
    farm.work(400.0)
    spread = max(farm.served.values()) - min(farm.served.values())
    assert spread <= max(max(own) for own in lengths) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(LENGTHS, min_size=2, max_size=4), st.integers(2, 6))
def test_and_of_many_workers_within_what_these_do_at_once(
    lengths: list[list[float]], workers: int
) -> None:
    farm = Farm(lengths={f"run-{n}": own for n, own in enumerate(lengths)}, workers=workers)
    farm.work(400.0)
    spread = max(farm.served.values()) - min(farm.served.values())
    assert spread <= workers * max(max(own) for own in lengths) * (1 + 1e-9)


def test_ten_times_longer_jobs_get_no_more() -> None:
    """Counting jobs under way instead would give the long ones ten times the seconds."""
    draw = random.Random(0)
    lengths = {
        "long": [draw.uniform(5.0, 15.0) for _ in range(50)],
        "short": [draw.uniform(0.5, 1.5) for _ in range(50)],
    }
    farm = Farm(lengths=lengths, workers=3)
    farm.work(5000.0)
    assert farm.served["long"] == pytest.approx(7500, rel=0.01)
    assert farm.served["short"] == pytest.approx(7500, rel=0.01)
