"""Full fine-tuning through the front door: two ranks, either killed, a download, and a GRPO run of
the model that was made."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.client import OffbeatClient
from offbeat.contracts.runs import RunStatus
from offbeat.contracts.weights import VersionFile
from tests.rank_deaths import RUN_TIMEOUT_S, kill_rank, ranked_stack
from tests.specs import sft_spec_dict, spec_dict

pytestmark = pytest.mark.system

STEPS = 6


def files_of(client: OffbeatClient, run_id: str) -> dict[str, VersionFile]:
    """The model that the run has made, once it has."""
    ended = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
    assert ended.status is RunStatus.SUCCEEDED, ended
    folder = client.model(run_id)
    return {file.name: file for file in folder.files}


def test_the_death_of_a_rank_costs_steps_and_the_model_is_the_same_to_the_byte(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = sft_spec_dict(
        model={"id": str(tiny_model)},
        data={"eval_size": 2},
        eval={"every_steps": 3},
        train={"steps": STEPS, "checkpoint_every": 2},
        limits={"max_attempts": 5},
    )
    del run["lora"]
    with ranked_stack(tmp_path / "data") as (stack, client):
        undisturbed = files_of(client, client.submit(run).id)
        run_id = client.submit(run).id
        kill_rank(stack, 1, lambda: client.run(run_id).progress.step >= 1)
        kill_rank(stack, 0, lambda: client.run(run_id).progress.step >= 3)
        assert files_of(client, run_id) == undisturbed

        folder = tmp_path / "model"
        command = ["model", run_id, "-o", str(folder), "--url", stack.addresses.orchestrator]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert {path.name for path in folder.iterdir()} == undisturbed.keys()
        trained = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        base = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
        assert not any(torch.equal(weight, base[name]) for name, weight in trained.items())

        stored = f"s3://{stack.object_store.bucket}/{client.model(run_id).prefix}"
        successor = client.submit(
            spec_dict(
                model={"id": stored},
                rewards=[{"type": "regex", "pattern": "[a-m]"}],
                rollout={"group_size": 4, "max_new_tokens": 6},
            )
        )
        assert client.wait(successor.id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
