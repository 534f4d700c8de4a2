"""The life of a run, as a pure function."""

from dataclasses import replace

import pytest

from offbeat.contracts.jobs import JobKind, WorkerRole
from offbeat.contracts.runs import RunStatus
from offbeat.errors import ConflictError
from services.orchestrator.run_state import (
    Drop,
    End,
    Evaluate,
    Generate,
    Group,
    Init,
    Prepare,
    RunAction,
    RunState,
    Train,
)
from services.orchestrator.runs import (
    GENERATION_FAILURES_MAX,
    missing_role,
    next_commands,
)
from services.orchestrator.status import TRANSITIONS, next_status
from tests.specs import spec

STEP = {"group_size": 2, "groups_per_step": 2}


def running(**changes: object) -> RunState:
    state = RunState(
        spec=spec(
            rollout=STEP,
            train={"steps": 4},
            staleness={"max_versions": 1},
            data={"eval_size": 2},
            eval={"every_steps": 2},
        ),
        status=RunStatus.RUNNING,
        prepared=True,
        version=0,
        evaluated=frozenset({0, 2, 4}),
    )
    return replace(state, **changes)  # type: ignore[arg-type]


def groups(*versions: int) -> tuple[Group, ...]:
    return tuple(Group(index=i, policy_version=v) for i, v in enumerate(versions))


def test_a_run_is_prepared_before_anything_else() -> None:
    state = running(prepared=False, version=None)
    assert next_commands(state) == [Prepare()]
    assert next_commands(replace(state, open_jobs={JobKind.PREPARE: 1})) == []


def test_a_step_starts_beside_the_hand_in_of_the_one_before() -> None:
    state = running(open_jobs={JobKind.TRAIN: 1}, training=2, ready=groups(0, 0))
    assert not any(isinstance(command, Train) for command in next_commands(state))
    (train,) = (
        command
        for command in next_commands(replace(state, computed_steps=1))
        if isinstance(command, Train)
    )
    assert train == Train(base_version=1, indexes=(0, 1))


def test_a_group_too_old_for_the_step_after_the_one_handed_in_is_dropped() -> None:
    state = running(
        version=1,
        open_jobs={JobKind.TRAIN: 1},
        training=2,
        computed_steps=1,
        ready=groups(0, 1, 1),
    )
    assert next_commands(state)[:2] == [
        Drop(indexes=(0,), reason="stale"),
        Train(base_version=2, indexes=(1, 2)),
    ]


def test_version_zero_is_made_before_anything_is_generated() -> None:
    state = running(version=None)
    assert next_commands(state) == [Init()]
    assert next_commands(replace(state, open_jobs={JobKind.INIT: 1})) == []


def test_generation_fills_the_staleness_window_at_once() -> None:
    assert next_commands(running()) == [Generate(num_groups=2, min_version=0)] * 2


def test_evaluations_are_started_once_for_every_version_that_is_due() -> None:
    state = running(evaluated=frozenset(), version=2, generating=4)
    assert next_commands(state) == [Evaluate(version=0), Evaluate(version=2)]
    assert next_commands(replace(state, evaluated=frozenset({0, 2}))) == []


def test_a_step_takes_the_oldest_groups_and_generation_goes_on() -> None:
    state = running(version=1, ready=groups(0, 1, 1), generating=1)
    assert next_commands(state) == [Train(base_version=1, indexes=(0, 1))]
    state = running(version=1, ready=groups(1, 1), generating=0)
    assert next_commands(state) == [
        Train(base_version=1, indexes=(0, 1)),
        Generate(num_groups=2, min_version=1),
    ]


def test_one_step_at_a_time() -> None:
    state = running(version=1, ready=groups(1, 1), training=2, open_jobs={JobKind.TRAIN: 1})
    assert next_commands(state) == []


def test_queue_time_counts_as_staleness() -> None:
    """S1: a group is judged when it is its turn, so one that waited too long is dropped."""
    state = running(version=3, ready=groups(1, 3, 3), generating=0)
    assert next_commands(state) == [
        Drop(indexes=(0,), reason="stale"),
        Train(base_version=3, indexes=(1, 2)),
    ]


def test_stale_groups_are_kept_where_the_spec_says_so() -> None:
    state = running(version=3, ready=groups(0, 3))
    kept = spec(rollout=STEP, train={"steps": 4}, staleness={"max_versions": 1, "policy": "keep"})
    assert next_commands(replace(state, spec=kept)) == [Train(base_version=3, indexes=(0, 1))]


def test_what_was_dropped_is_generated_again() -> None:
    state = running(version=3, ready=groups(1, 1))
    assert next_commands(state) == [
        Drop(indexes=(0, 1), reason="stale"),
        Generate(num_groups=2, min_version=3),
    ]


def flat_groups(*signals: bool) -> tuple[Group, ...]:
    return tuple(Group(index=i, policy_version=0, has_signal=s) for i, s in enumerate(signals))


def test_dynamic_sampling_replaces_groups_without_variance_up_to_its_cap() -> None:
    """S13: refilled until the step is full of signal, or three times its groups were made."""
    dynamic = spec(
        rollout={**STEP, "dynamic_sampling": True},
        train={"steps": 4},
        staleness={"max_versions": 0},
    )
    state = replace(running(ready=flat_groups(True, False)), spec=dynamic)
    assert next_commands(state) == [
        Drop(indexes=(1,), reason="zero_variance"),
        Generate(num_groups=1, min_version=0),
    ]
    state = replace(state, ready=flat_groups(False, False), refilled=3)
    assert next_commands(state) == [
        Drop(indexes=(0,), reason="zero_variance"),
        Generate(num_groups=1, min_version=0),
    ]
    state = replace(state, ready=flat_groups(False, False), refilled=4)
    assert next_commands(state) == [Train(base_version=0, indexes=(0, 1))]


def test_a_synchronous_step_replaces_flat_groups_once_all_are_there() -> None:
    """Whichever came first: so the bytes do not depend on it."""
    dynamic = spec(
        rollout={**STEP, "groups_per_step": 3, "dynamic_sampling": True},
        train={"steps": 4},
        staleness={"max_versions": 0},
    )
    state = replace(running(ready=flat_groups(True, False), generating=1), spec=dynamic)
    assert next_commands(state) == []
    state = replace(state, ready=flat_groups(True, False, True), generating=0)
    assert next_commands(state)[0] == Drop(indexes=(1,), reason="zero_variance")


@pytest.mark.parametrize("generators", [0, 1, 2, 7])
def test_a_synchronous_step_does_not_depend_on_how_many_generators_are_alive(
    generators: int,
) -> None:
    synchronous = spec(
        rollout={"group_size": 16, "groups_per_step": 7},
        train={"steps": 4},
        staleness={"max_versions": 0},
    )
    commands = next_commands(replace(running(generators=generators), spec=synchronous))
    assert commands == [
        *([Generate(num_groups=2, min_version=0)] * 3),
        Generate(num_groups=1, min_version=0),
    ]


@pytest.mark.parametrize(("runs", "sizes"), [(1, [1] * 8), (2, [2] * 4), (4, [4] * 2)])
def test_a_step_is_spread_over_the_run_s_share_of_the_generators(
    runs: int, sizes: list[int]
) -> None:
    """A first and a second step of four groups, with 7 generators: a share of 7, 3 or 1."""
    spread = spec(
        rollout={"group_size": 2, "groups_per_step": 4},
        train={"steps": 4},
        staleness={"max_versions": 1},
    )
    state = replace(running(generators=7, generating_runs=runs), spec=spread)
    commands = next_commands(state)
    assert commands == [Generate(num_groups=size, min_version=0) for size in sizes]


def test_a_run_ends_after_its_last_step_and_evaluation() -> None:
    end = End(action=RunAction.SUCCEED, reason="all 4 steps are done")
    assert next_commands(running(version=4)) == [end]
    assert next_commands(running(version=4, open_jobs={JobKind.EVALUATE: 1})) == []
    due = running(version=4, evaluated=frozenset({0, 2}))
    assert next_commands(due) == [Evaluate(version=4)]


def test_limits_end_a_run_with_the_reason() -> None:
    limited = spec(limits={"max_runtime_s": 60, "max_gpu_seconds": 100})
    assert next_commands(replace(running(runtime_s=61), spec=limited)) == [
        End(action=RunAction.FAIL, reason="it ran longer than limits.max_runtime_s (60 s)")
    ]
    assert next_commands(replace(running(worker_seconds=101), spec=limited)) == [
        End(action=RunAction.FAIL, reason="its jobs took more than limits.max_gpu_seconds (100 s)")
    ]


def test_a_run_whose_generation_always_fails_ends() -> None:
    state = running(generation_failures=GENERATION_FAILURES_MAX)
    assert next_commands(state) == [
        End(action=RunAction.FAIL, reason="5 generate jobs in a row brought no result")
    ]


@pytest.mark.parametrize("status", [s for s in RunStatus if s is not RunStatus.RUNNING])
def test_a_run_that_is_not_running_asks_for_nothing(status: RunStatus) -> None:
    assert next_commands(running(status=status, prepared=False)) == []


@pytest.mark.parametrize("status", RunStatus)
@pytest.mark.parametrize("action", RunAction)
def test_every_action_is_either_in_the_table_or_refused(
    status: RunStatus, action: RunAction
) -> None:
    if (status, action) in TRANSITIONS:
        assert next_status(status, action) is TRANSITIONS[status, action]
    else:
        with pytest.raises(ConflictError, match=f"a run that is {status} cannot {action}"):
            next_status(status, action)


def test_a_refusal_says_what_is_possible() -> None:
    with pytest.raises(ConflictError, match="cannot resume; it can be: cancel, pause"):
        next_status(RunStatus.QUEUED, RunAction.RESUME)
    with pytest.raises(ConflictError, match="it cannot be changed any more"):
        next_status(RunStatus.SUCCEEDED, RunAction.CANCEL)


def test_x3_open_jobs_without_anybody_to_do_them_name_who_is_missing() -> None:
    state = running(runtime_s=30.0, open_jobs={JobKind.GENERATE: 2, JobKind.TRAIN: 1})
    assert missing_role(state) is None
    assert missing_role(replace(state, generators=0)) is WorkerRole.GENERATOR
    assert missing_role(replace(state, trainers=0)) is WorkerRole.TRAINER
    only_train = replace(state, generators=0, open_jobs={JobKind.TRAIN: 1})
    assert missing_role(only_train) is None
    assert missing_role(replace(state, generators=0, runtime_s=5.0)) is None
