"""Who decides: the life of a run as pure functions.

    next_commands(run) -> commands    what to start, drop or end now, given all that is known

Nothing here reads a clock, a database or a queue; `scheduler.py` loads a `RunState`, asks, and
carries out the commands in one transaction. Asking twice with the same state gives the same
commands, and once they are carried out the state asks for nothing more: any crash in between only
costs a repetition.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.contracts.jobs import JobKind, PrepareInput, TokenizeInput, WorkerRole
from offbeat.contracts.run_kinds import RunKind
from offbeat.contracts.runs import RunStatus
from services.orchestrator.admission import capacity_groups, job_sizes, synchronous_job_sizes
from services.orchestrator.run_state import (
    Command,
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
    TrainExamples,
)

FIRST_REPORT_S = 20.0
"""A fleet that is started together with a run has so long to report, before it is missed."""
GENERATION_FAILURES_MAX = 5
"""Generate jobs in a row without a result after which a run is not worth going on with."""
ZERO_VARIANCE = "zero_variance"
"""The reason with which dynamic sampling drops a group."""


def next_commands(run: RunState) -> list[Command]:
    """What to do now. A run that is not running asks for nothing."""
    if run.status is not RunStatus.RUNNING:
        return []
    exhausted = _exhausted(run)
    if exhausted:
        return [End(action=RunAction.FAIL, reason=exhausted)]
    method = METHODS[run.spec.kind]
    if not run.prepared:
        return [] if run.open_jobs.get(JobKind(method.prepare.kind)) else [Prepare()]
    if run.version is None:
        return [] if run.open_jobs.get(JobKind.INIT) else [Init()]
    if _is_finished(run, run.version):
        return [End(action=RunAction.SUCCEED, reason=f"all {run.spec.train.steps} steps are done")]
    # A step that is computed counts as done for the next one, which begins beside its upload.
    base_version = run.version + run.computed_steps
    return method.go_on(run, run.version, base_version)


def missing_role(run: RunState) -> WorkerRole | None:
    """The kind of worker that the run's jobs wait for while not one is there."""
    if run.runtime_s < FIRST_REPORT_S:
        return None
    there = {WorkerRole.GENERATOR: run.generators, WorkerRole.TRAINER: run.trainers}
    wanted = {kind.role for kind, count in run.open_jobs.items() if count}
    return next((role for role in WorkerRole if role in wanted and not there[role]), None)


def _exhausted(run: RunState) -> str | None:
    limits = run.spec.limits
    if limits.max_runtime_s is not None and run.runtime_s > limits.max_runtime_s:
        return f"it ran longer than limits.max_runtime_s ({limits.max_runtime_s:g} s)"
    if limits.max_gpu_seconds is not None and run.worker_seconds > limits.max_gpu_seconds:
        return f"its jobs took more than limits.max_gpu_seconds ({limits.max_gpu_seconds:g} s)"
    if run.generation_failures >= GENERATION_FAILURES_MAX:
        return f"{run.generation_failures} generate jobs in a row brought no result"
    return None


def _go_on_with_groups(run: RunState, version: int, base_version: int) -> list[Command]:
    stale, fresh = _split_stale(run, base_version)
    flat, fresh = _split_flat(run, fresh)
    train = _train(run, base_version, fresh)
    return [
        *_evaluate(run, version),
        *([Drop(indexes=stale, reason="stale")] if stale else []),
        *([Drop(indexes=flat, reason=ZERO_VARIANCE)] if flat else []),
        *train,
        *_generate(run, version, waiting=run.training + len(fresh), idle=not train),
    ]


def _go_on_with_examples(run: RunState, version: int, base_version: int) -> list[Command]:
    """Examples are there from the beginning, so a step waits for the one before it alone."""
    return [TrainExamples(base_version=base_version)] if _may_train(run, base_version) else []


def _is_finished(run: RunState, version: int) -> bool:
    done = version >= run.spec.train.steps
    return (
        done
        and run.evaluated.issuperset(run.spec.eval_versions)
        and not run.open_jobs.get(JobKind.EVALUATE)
    )


def _evaluate(run: RunState, version: int) -> list[Evaluate]:
    due = [v for v in run.spec.eval_versions if v <= version and v not in run.evaluated]
    return [Evaluate(version=v) for v in due]


def _split_stale(run: RunState, version: int) -> tuple[tuple[int, ...], list[Group]]:
    """Groups too old for the step that starts from `version`, and the rest.

    Staleness is v_train − v_sample, taken now, so the time in the queue counts (prime-rl#3313).
    """
    if run.spec.staleness.policy == "keep":
        return (), list(run.ready)
    oldest = version - run.spec.staleness.max_versions
    stale = tuple(group.index for group in run.ready if group.policy_version < oldest)
    return stale, [group for group in run.ready if group.policy_version >= oldest]


def _split_flat(run: RunState, fresh: list[Group]) -> tuple[tuple[int, ...], list[Group]]:
    """Groups to replace because their rewards are all equal, and the rest (DAPO, arXiv 2503.14476).

    The replacements of one step are bounded; past the bound the groups are kept. A synchronous run
    chooses among all groups of the step, whichever came first.
    """
    rollout = run.spec.rollout
    incomplete = run.spec.staleness.max_versions == 0 and run.generating
    if not rollout.dynamic_sampling or incomplete:
        return (), fresh
    allowed = int((rollout.oversampling_max - 1) * rollout.groups_per_step) - run.refilled
    flat = tuple(group.index for group in fresh if not group.has_signal)[: max(0, allowed)]
    return flat, [group for group in fresh if group.index not in flat]


def _train(run: RunState, base_version: int, fresh: Sequence[Group]) -> list[Train]:
    wanted = run.spec.rollout.groups_per_step
    if not _may_train(run, base_version) or len(fresh) < wanted:
        return []
    chosen = tuple(group.index for group in fresh[:wanted])
    return [Train(base_version=base_version, indexes=chosen)]


def _may_train(run: RunState, base_version: int) -> bool:
    under_way = run.open_jobs.get(JobKind.TRAIN, 0) - run.computed_steps
    return not under_way and base_version < run.spec.train.steps


def _generate(run: RunState, version: int, *, waiting: int, idle: bool) -> list[Generate]:
    capacity = capacity_groups(
        version=version,
        oldest=version if run.oldest_generating is None else run.oldest_generating,
        max_versions=run.spec.staleness.max_versions,
        groups_per_step=run.spec.rollout.groups_per_step,
        steps=run.spec.train.steps,
        running=run.generating,
        waiting=waiting,
        max_inflight=run.spec.staleness.max_inflight_groups,
    )
    if run.spec.staleness.max_versions == 0:
        sizes = synchronous_job_sizes(capacity, group_size=run.spec.rollout.group_size)
    else:
        sizes = job_sizes(
            capacity,
            groups_per_step=run.spec.rollout.groups_per_step,
            generators=run.generators,
            runs=run.generating_runs,
            idle=idle and not run.generating and not run.training,
        )
    return [Generate(num_groups=size, min_version=version) for size in sizes]


@dataclass(frozen=True, kw_only=True)
class Method:
    """In what a kind of run differs."""

    roles: tuple[WorkerRole, ...]
    """The workers without which it cannot go on."""
    prepare: PrepareInput | TokenizeInput
    """The job that reads its data."""
    go_on: Callable[[RunState, int, int], list[Command]]
    """What to do once version 0 is there: from the run, its version and the base of its next
    step."""


METHODS: Mapping[RunKind, Method] = {
    "grpo": Method(roles=tuple(WorkerRole), prepare=PrepareInput(), go_on=_go_on_with_groups),
    "sft": Method(roles=(WorkerRole.TRAINER,), prepare=TokenizeInput(), go_on=_go_on_with_examples),
}
