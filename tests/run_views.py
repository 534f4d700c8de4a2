"""Views of runs and what belongs to them, as the orchestrator would show them."""

from datetime import UTC, datetime, timedelta

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.leases import ServedVersion, WorkerReport
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import (
    EventLevel,
    RolloutView,
    RunEvent,
    RunProgress,
    RunStatus,
    RunView,
    WorkerView,
)
from offbeat.specs import validate_spec

CREATED_AT = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
SPEC = {
    "name": "chain-sum",
    "model": {"id": "smollm2-135m-instruct"},
    "data": {"source": "reasoning_gym", "tasks": [{"name": "chain_sum"}], "size": 64},
    "rewards": [{"type": "reasoning_gym", "extract": "last_number"}],
    "train": {"steps": 40},
}


def spec() -> RunSpec:
    """A small spec."""
    return validate_spec(SPEC)


def run(
    run_id: str = "run-00000000a1",
    *,
    status: RunStatus = RunStatus.RUNNING,
    status_reason: str | None = None,
    step: int = 12,
    name: str = "chain-sum",
) -> RunView:
    """A run between two steps, or before the first one."""
    begun = status is not RunStatus.QUEUED
    return RunView(
        id=run_id,
        name=name,
        status=status,
        status_reason=status_reason,
        pool="default",
        priority=0,
        tags={"team": "a"},
        created_at=CREATED_AT,
        started_at=CREATED_AT + timedelta(seconds=2) if begun else None,
        finished_at=CREATED_AT + timedelta(seconds=762) if status.is_final else None,
        progress=RunProgress(
            step=step,
            steps=40,
            version=step if begun else None,
            reward=step / 40 if step else None,
            staleness_mean=1.0 if step else None,
            generated_tokens_per_s=181.6 if step else None,
            groups_generating=6 if begun else 0,
            groups_ready=2 if begun else 0,
            eta_s=None if status.is_final or step < 2 else 190.0,
        ),
        spec=spec(),
    )


def event(
    event_id: int,
    message: str,
    *,
    kind: str = "step_done",
    level: EventLevel = EventLevel.INFO,
    run_id: str = "run-00000000a1",
) -> RunEvent:
    """An entry of a run's log, one a second."""
    at = CREATED_AT + timedelta(seconds=event_id)
    return RunEvent(id=event_id, run_id=run_id, at=at, level=level, kind=kind, message=message)


def rollout(sample: int, *, reward: float | None = 1.0, version: int = 3) -> RolloutView:
    """A sample of the one group."""
    return RolloutView(
        group_id="g-000007",
        prompt_id="train-3",
        sample=sample,
        policy_version=version,
        prompt="What is 3 + 4?",
        completion=f"3 + 4 = {6 + sample}",
        finish_reason="stop",
        reward=reward,
        rewards={"reasoning_gym": reward},
        num_tokens=9,
        trained_step=4,
    )


def worker(worker_id: str = "generator-1") -> WorkerView:
    """A generator that serves a version and holds a job."""
    return WorkerView(
        id=worker_id,
        status="alive",
        last_seen_at=CREATED_AT,
        report=WorkerReport(
            role=WorkerRole.GENERATOR,
            pool="default",
            engine="transformers",
            host="here",
            pid=1,
            started_at=CREATED_AT,
            serving=(ServedVersion(run_id="run-00000000a1", version=12, adapter_sha256="0" * 64),),
        ),
        jobs=("job-1",),
    )
