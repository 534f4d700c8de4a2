"""Capacity, job sizes, and the order of prompts."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.epochs import prompt_row
from services.orchestrator.admission import (
    capacity_groups,
    group_seed,
    job_sizes,
    synchronous_job_sizes,
)


def capacity(
    version: int,
    running: int,
    waiting: int,
    *,
    oldest: int | None = None,
    eta: int = 1,
    limit: int | None = None,
) -> int:
    return capacity_groups(
        version=version,
        oldest=version if oldest is None else oldest,
        max_versions=eta,
        groups_per_step=8,
        steps=40,
        running=running,
        waiting=waiting,
        max_inflight=limit,
    )


def test_capacity_is_areals_formula() -> None:
    assert capacity(0, 0, 0) == 16
    assert capacity(0, 16, 0) == 0
    assert capacity(0, 8, 8) == 0
    assert capacity(1, 0, 8) == 8
    assert capacity(1, 0, 0, limit=5) == 5


def test_synchronous_capacity_is_one_step() -> None:
    """S3: a limit that is multiplied by a staleness of zero would start nothing, ever."""
    assert capacity(0, 0, 0, eta=0) == 8
    assert capacity(0, 8, 0, eta=0) == 0
    assert capacity(0, 0, 8, eta=0) == 0
    assert capacity(1, 0, 0, eta=0) == 8


def test_a_slow_group_holds_later_ones_back() -> None:
    """S5: no more is started than the η steps that may be taken without it can use."""
    assert capacity(1, 1, 0, oldest=0) == 7
    assert capacity(2, 1, 0, oldest=1) == 7
    assert capacity(2, 1, 0, oldest=0) == -1
    assert capacity(1, 1, 0, oldest=1) == 15


def test_resume_at_any_version_admits_no_burst() -> None:
    """S2: a counter of accepted groups that restarts at zero would admit (η + 101)·B."""
    assert capacity(30, 0, 0, eta=4) == 40
    assert capacity(0, 0, 0, eta=4) == 40


def test_the_last_steps_start_nothing_that_cannot_be_used() -> None:
    assert capacity(39, 0, 0, eta=4) == 8
    assert capacity(39, 8, 0, eta=4) == 0
    assert capacity(40, 0, 0, eta=4) == 0


@given(
    version=st.integers(0, 40),
    running=st.integers(0, 60),
    waiting=st.integers(0, 60),
    eta=st.integers(0, 6),
)
def test_what_is_under_way_never_passes_the_bound(
    version: int, running: int, waiting: int, eta: int
) -> None:
    started = max(0, capacity(version, running, waiting, eta=eta))
    if started:
        assert running + waiting + started <= (eta + 1) * 8
    if not running and not waiting and version < 40:
        assert started > 0


@given(
    version=st.integers(0, 40),
    running=st.integers(0, 60),
    waiting=st.integers(0, 60),
    eta=st.integers(0, 6),
    limit=st.integers(1, 1024),
)
def test_s4_a_queue_longer_than_staleness_allows_is_not_filled(
    version: int, running: int, waiting: int, eta: int, limit: int
) -> None:
    """The default is the longest that can be used: a limit above it admits nothing more, so nothing
    waits in the queue until it is too old."""
    default = capacity(version, running, waiting, eta=eta)
    assert capacity(version, running, waiting, eta=eta, limit=limit) <= max(0, default)
    if limit >= (eta + 1) * 8:
        assert max(0, capacity(version, running, waiting, eta=eta, limit=limit)) == max(0, default)


def test_a_synchronous_step_is_split_by_its_size_alone() -> None:
    """Into jobs of 32 samples, so that its bytes do not depend on who is alive."""
    assert synchronous_job_sizes(8, group_size=8) == [4, 4]
    assert synchronous_job_sizes(3, group_size=16) == [2, 1]
    assert synchronous_job_sizes(2, group_size=100) == [1, 1]
    assert synchronous_job_sizes(0, group_size=8) == []
    assert synchronous_job_sizes(-1, group_size=8) == []


def test_a_steps_groups_are_spread_over_the_generators() -> None:
    assert job_sizes(16, groups_per_step=8, generators=1, runs=1, idle=False) == [8, 8]
    assert job_sizes(16, groups_per_step=8, generators=3, runs=1, idle=False) == [3] * 5
    assert job_sizes(0, groups_per_step=8, generators=1, runs=1, idle=True) == []
    assert job_sizes(-3, groups_per_step=8, generators=1, runs=1, idle=True) == []


def test_runs_that_share_generators_do_not_each_spread_over_all() -> None:
    assert job_sizes(16, groups_per_step=8, generators=8, runs=1, idle=False) == [1] * 16
    assert job_sizes(16, groups_per_step=8, generators=8, runs=2, idle=False) == [2] * 8
    assert job_sizes(16, groups_per_step=8, generators=8, runs=50, idle=False) == [8, 8]
    assert job_sizes(16, groups_per_step=8, generators=0, runs=0, idle=False) == [8, 8]


def test_less_than_a_job_waits_unless_the_run_would_stand_still() -> None:
    assert job_sizes(3, groups_per_step=8, generators=1, runs=1, idle=False) == []
    assert job_sizes(3, groups_per_step=8, generators=1, runs=1, idle=True) == [3]


def test_every_prompt_comes_once_an_epoch_in_a_new_order() -> None:
    rows = [prompt_row(i, num_prompts=5, seed=3, shuffle=True) for i in range(15)]
    epochs = [rows[0:5], rows[5:10], rows[10:15]]
    assert [Counter(epoch) for epoch in epochs] == [Counter(range(5))] * 3
    assert epochs[0] != epochs[1]
    assert rows == [prompt_row(i, num_prompts=5, seed=3, shuffle=True) for i in range(15)]
    assert [prompt_row(i, num_prompts=3, seed=3, shuffle=False) for i in range(4)] == [0, 1, 2, 0]


def test_group_seeds_follow_the_runs_seed() -> None:
    assert group_seed(7, 0) == group_seed(7, 0)
    assert len({group_seed(seed, index) for seed in range(10) for index in range(10)}) == 100
    assert all(0 <= group_seed(7, index) < 2**62 for index in range(100))
