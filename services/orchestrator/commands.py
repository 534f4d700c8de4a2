"""Carrying out what `runs.next_commands` asked for, within the transaction that holds the run."""

from pydantic import JsonValue
from sqlalchemy.orm import Session

from offbeat.contracts.jobs import (
    EvaluateInput,
    ExampleBatch,
    GenerateInput,
    GroupRequest,
    InitInput,
    ReadyGroup,
    TrainInput,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import EventLevel
from offbeat.data.epochs import prompt_row, step_rows
from services.orchestrator.admission import group_seed
from services.orchestrator.groups import drop_groups, group_id, groups_at
from services.orchestrator.jobs import add_job
from services.orchestrator.lifecycle import end_run
from services.orchestrator.run_state import (
    Command,
    Drop,
    End,
    Evaluate,
    Generate,
    GroupStatus,
    Init,
    Prepare,
    Train,
    TrainExamples,
)
from services.orchestrator.runs import METHODS, ZERO_VARIANCE
from services.orchestrator.schema import GroupRow, RunRow
from services.orchestrator.store import add_event


def carry_out(session: Session, run: RunRow, spec: RunSpec, command: Command, now: float) -> None:
    """Change the database as the command says."""
    match command:
        case Prepare():
            add_job(session, run, spec, METHODS[spec.kind].prepare, now)
        case Init():
            assert run.prompts_key is not None
            init = InitInput(prompts_key=run.prompts_key, eval_prompts_key=run.eval_prompts_key)
            add_job(session, run, spec, init, now)
        case Evaluate(version=version):
            assert run.eval_prompts_key is not None
            job = EvaluateInput(prompts_key=run.eval_prompts_key, version=version)
            add_job(session, run, spec, job, now)
        case Generate():
            _add_generate(session, run, spec, command, now)
        case Train():
            _add_train(session, run, spec, command, now)
        case TrainExamples(base_version=base_version):
            add_job(session, run, spec, _example_step(run, spec, base_version), now)
        case Drop(indexes=indexes, reason=reason):
            run.refilled += len(indexes) if reason == ZERO_VARIANCE else 0
            drop_groups(session, run.id, groups_at(session, run.id, indexes), reason, now)
        case End(action=action, reason=reason):
            end_run(session, run, action, reason, now)


def _add_generate(
    session: Session, run: RunRow, spec: RunSpec, command: Generate, now: float
) -> None:
    assert run.prompts_key is not None
    first = run.next_group
    run.next_group += command.num_groups
    rows = {index: _row(run, spec, index) for index in range(first, run.next_group)}
    requests = tuple(
        GroupRequest(
            group_id=group_id(index), prompt_row=row, seed=group_seed(spec.train.seed, index)
        )
        for index, row in rows.items()
    )
    job = GenerateInput(
        prompts_key=run.prompts_key, groups=requests, min_version=command.min_version
    )
    job_id = add_job(session, run, spec, job, now)
    session.add_all(
        GroupRow(
            run_id=run.id,
            index=index,
            prompt_row=row,
            status=GroupStatus.GENERATING,
            generate_job_id=job_id,
        )
        for index, row in rows.items()
    )


def _add_train(session: Session, run: RunRow, spec: RunSpec, command: Train, now: float) -> None:
    groups = groups_at(session, run.id, command.indexes)
    job = TrainInput(
        base_version=command.base_version,
        groups=tuple(_ready_group(group) for group in groups),
        num_refilled=run.refilled,
    )
    run.refilled = 0
    job_id = add_job(session, run, spec, job, now)
    for group in groups:
        group.status = GroupStatus.TRAINING
        group.train_job_id = job_id
    flat: list[JsonValue] = [group_id(group.index) for group in groups if not group.reward_std]
    if spec.rollout.dynamic_sampling and flat:
        add_event(
            session,
            run.id,
            now,
            "dynamic_sampling_gave_up",
            f"{len(flat)} group(s) without variance are trained on: "
            f"rollout.oversampling_max ({spec.rollout.oversampling_max:g}) is reached.",
            level=EventLevel.WARNING,
            data={"group_ids": flat},
        )


def _example_step(run: RunRow, spec: RunSpec, base_version: int) -> TrainInput:
    """The next `batch_size` examples in the order of the epoch."""
    assert run.prompts_key is not None
    return TrainInput(
        base_version=base_version,
        examples=ExampleBatch(
            examples_key=run.prompts_key,
            rows=step_rows(spec, base_version, run.num_prompts),
            eval_examples_key=run.eval_prompts_key,
        ),
    )


def _row(run: RunRow, spec: RunSpec, index: int) -> int:
    return prompt_row(
        index, num_prompts=run.num_prompts, seed=spec.data.seed, shuffle=spec.data.shuffle
    )


def _ready_group(group: GroupRow) -> ReadyGroup:
    assert group.rollouts_key is not None
    assert group.policy_version is not None
    assert group.adapter_sha256 is not None
    return ReadyGroup(
        group_id=group_id(group.index),
        rollouts_key=group.rollouts_key,
        policy_version=group.policy_version,
        adapter_sha256=group.adapter_sha256,
    )
