"""Real generators and trainers leave on SIGTERM while runs of different rank go on."""

import io
import signal
from pathlib import Path

import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import RunStatus
from scripts.stack import StackOptions, running_stack
from tests.specs import spec_dict
from tests.waiting import wait_until

pytestmark = pytest.mark.system

RUN_TIMEOUT_S = 240.0


def test_workers_that_are_told_to_stop_cost_no_attempt(tiny_model: Path, tmp_path: Path) -> None:
    options = StackOptions(data_dir=tmp_path / "data", generators=2)
    with (
        running_stack(options, io.StringIO()) as stack,
        OffbeatClient(stack.addresses.orchestrator) as client,
    ):
        runs = [
            client.submit(
                spec_dict(
                    model={"id": str(tiny_model)},
                    lora={"rank": rank, "alpha": 2 * rank},
                    rollout={"group_size": 4, "groups_per_step": 2, "max_new_tokens": 6},
                    rewards=[{"type": "regex", "pattern": "[a-m]"}],
                    train={"steps": 8},
                )
            ).id
            for rank in (2, 8)
        ]
        wait_until(lambda: client.run(runs[0]).progress.step >= 1, RUN_TIMEOUT_S)
        for worker in ("generator-1", "trainer-1"):
            process = stack.process(worker)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            assert worker not in [view.id for view in client.workers()]
            stack.restart(worker)
        for run_id in runs:
            assert client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
            kinds = [event.kind for event in client.iter_events(run_id)]
            assert "job_requeued" not in kinds
            assert "groups_dropped" not in kinds
