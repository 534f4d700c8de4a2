"""What a job's result changes: the run, its groups, metrics and log."""

from pydantic import TypeAdapter
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from offbeat.contracts.chat import ChatOutput
from offbeat.contracts.jobs import (
    EvaluateOutput,
    GenerateOutput,
    InitOutput,
    JobOutput,
    PrepareOutput,
    ReplayOutput,
    TokenizeOutput,
    TrainInput,
    TrainOutput,
)
from offbeat.contracts.runs import EventLevel
from offbeat.contracts.weights import Manifest
from offbeat.errors import InvalidRequestError
from services.orchestrator.clipping import report_clipping
from services.orchestrator.groups import (
    drop_groups,
    group_id,
    group_index,
    groups_generated_by,
    groups_trained_by,
)
from services.orchestrator.jobs import INPUT
from services.orchestrator.quotas import add_stored
from services.orchestrator.run_state import GroupStatus
from services.orchestrator.schema import GroupRow, JobRow, RunRow, VersionRow
from services.orchestrator.store import add_event, add_metrics

OUTPUT: TypeAdapter[JobOutput] = TypeAdapter(JobOutput)
OUTPUTS = select(JobRow.output).where(JobRow.id.in_(bindparam("job_ids", expanding=True)))


def apply_output(session: Session, run: RunRow, job: JobRow, output: JobOutput, now: float) -> None:
    """Take the result of a job whose lease was checked."""
    match output:
        case PrepareOutput() | TokenizeOutput():
            _apply_prepared(session, run, output, now)
        case InitOutput():
            # Version 0 comes from no step whose pace would say anything.
            metrics = {
                name: value
                for name, value in output.manifest.metrics.items()
                if not name.startswith("perf/")
            }
            _apply_version(session, run, job, output.manifest, metrics, now)
        case TrainOutput():
            metrics = {**output.manifest.metrics, "perf/publish_s": output.publish_s}
            _apply_version(session, run, job, output.manifest, metrics, now)
        case GenerateOutput():
            _apply_generate(session, run, job, output, now)
        case EvaluateOutput():
            _apply_evaluate(session, run, output, now)
        case ReplayOutput():
            _apply_replay(session, run, output, now)
        case ChatOutput():
            pass  # the answer has been heard
    add_stored(session, run, output, now)


def _apply_prepared(
    session: Session, run: RunRow, output: PrepareOutput | TokenizeOutput, now: float
) -> None:
    run.prompts_key = output.prompts_key
    run.num_prompts = output.num_prompts
    run.eval_prompts_key = output.eval_prompts_key
    kind, name, more = "prompts_ready", "prompts", ""
    if isinstance(output, TokenizeOutput):
        kind, name = "examples_ready", "examples"
        more = f" The loss is taken on {output.num_target_tokens} tokens of an epoch."
        more += f" Cut off at sft.max_length: {output.num_cut}." if output.num_cut else ""
    add_event(
        session,
        run.id,
        now,
        kind,
        f"{output.num_prompts} training and {output.num_eval_prompts} held-out {name} are ready."
        + more,
        data={"prompts_key": output.prompts_key, "eval_prompts_key": output.eval_prompts_key},
    )


def _apply_version(
    session: Session,
    run: RunRow,
    job: JobRow,
    manifest: Manifest,
    metrics: dict[str, float],
    now: float,
) -> None:
    expected = 0 if run.version is None else run.version + 1
    if manifest.run_id != run.id or manifest.version != expected:
        raise InvalidRequestError(
            f"job {job.id} was to make version {expected} of {run.id}, "
            f"not version {manifest.version} of {manifest.run_id}"
        )
    run.version = manifest.version
    session.add(VersionRow(run_id=run.id, version=manifest.version, prefix=manifest.prefix))
    dropped = {group_index(name) for name in manifest.dropped_group_ids}
    groups = groups_trained_by(session, job.id)
    for group in groups:
        if group.index not in dropped:
            group.status = GroupStatus.TRAINED
            group.trained_step = manifest.version
    refused = [group for group in groups if group.index in dropped]
    drop_groups(session, run.id, refused, "unknown_policy", now)
    if groups:
        step = INPUT.validate_json(job.input)
        assert isinstance(step, TrainInput)
        metrics = {
            **metrics,
            **_generation_metrics(session, groups),
            "rollout/oversampling": (len(groups) + step.num_refilled) / len(groups),
        }
    add_metrics(session, run.id, manifest.version, metrics)
    add_event(
        session,
        run.id,
        now,
        "version_published",
        f"Policy version {manifest.version} is published.",
        data={
            "version": manifest.version,
            "adapter_sha256": manifest.sha256,
            "job_id": job.id,
            "group_ids": [group_id(group.index) for group in groups],
        },
    )
    _report_skipped(session, run, manifest, now)
    if groups:
        report_clipping(session, run.id, manifest.version, now)


def _report_skipped(session: Session, run: RunRow, manifest: Manifest, now: float) -> None:
    if manifest.skipped is None:
        return
    add_event(
        session,
        run.id,
        now,
        "step_skipped",
        f"Step {manifest.version} changed nothing: {manifest.skipped.reason}.",
        level=EventLevel.WARNING,
        data=manifest.skipped.model_dump(),
    )


def _generation_metrics(session: Session, groups: list[GroupRow]) -> dict[str, float]:
    """Rate of the jobs that made these groups: tokens over time in the engine."""
    jobs = {group.generate_job_id for group in groups}
    bodies = session.scalars(OUTPUTS, {"job_ids": jobs})
    outputs = [OUTPUT.validate_json(body) for body in bodies if body]
    generated = [output for output in outputs if isinstance(output, GenerateOutput)]
    seconds = sum(output.generate_s for output in generated)
    tokens = sum(output.generated_tokens for output in generated)
    return {"rollout/generated_tok_s": tokens / seconds} if seconds > 0 else {}


def _apply_generate(
    session: Session, run: RunRow, job: JobRow, output: GenerateOutput, now: float
) -> None:
    run.generation_failures = 0
    summaries = {group_index(summary.group_id): summary for summary in output.groups}
    groups = groups_generated_by(session, job.id)
    for group in groups:
        summary = summaries.get(group.index)
        if summary is None or not summary.num_samples:
            continue
        group.status = GroupStatus.READY
        group.rollouts_key = output.rollouts_key
        group.policy_version = summary.policy_version
        group.adapter_sha256 = summary.adapter_sha256
        group.reward_mean = summary.reward_mean
        group.reward_std = summary.reward_std
        group.num_tokens = summary.num_tokens
        group.ready_at = now
    empty = [group for group in groups if group.status is GroupStatus.GENERATING]
    drop_groups(session, run.id, empty, "no_samples", now)


def _apply_evaluate(session: Session, run: RunRow, output: EvaluateOutput, now: float) -> None:
    add_metrics(session, run.id, output.version, output.metrics)
    reward = output.metrics.get("eval/reward")
    shown = "no reward" if reward is None else f"mean reward {reward:.3f}"
    add_event(
        session,
        run.id,
        now,
        "evaluated",
        f"Version {output.version} was evaluated: {shown} on the held-out prompts.",
        data={"version": output.version, **output.metrics, "rollouts_key": output.rollouts_key},
    )


def _apply_replay(session: Session, run: RunRow, output: ReplayOutput, now: float) -> None:
    same = output.recomputed_sha256 == output.published_sha256
    add_event(
        session,
        run.id,
        now,
        "replayed",
        f"Step {output.version} was taken again and gave "
        f"{'the same adapter' if same else 'another adapter'}.",
        level=EventLevel.INFO if same else EventLevel.ERROR,
        data=output.model_dump(exclude={"kind"}),
    )
