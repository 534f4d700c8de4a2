"""A trainer of two ranks does runs as one of one rank does, and outlives the death of either."""

import signal
from pathlib import Path

import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import RunStatus
from offbeat.objects import S3ObjectStore
from tests.rank_deaths import RUN_TIMEOUT_S, kill_rank, ranked_stack
from tests.specs import sft_spec_dict, spec_dict
from tests.tiny_model import upload

pytestmark = pytest.mark.system

STEPS = 6


def adapter_of(client: OffbeatClient, run_id: str) -> str:
    assert client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    [newest] = [one for one in client.checkpoints(run_id) if one.version == STEPS]
    return newest.adapter_sha256


def test_the_death_of_a_rank_costs_a_step_and_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Invariants 4 and 7: in a synchronous run the adapter is the undisturbed run's to the byte."""
    run = spec_dict(
        model={"id": str(tiny_model)},
        rollout={"group_size": 4, "groups_per_step": 2, "max_new_tokens": 6},
        rewards=[{"type": "regex", "pattern": "[a-m]"}],
        train={"steps": STEPS},
        staleness={"max_versions": 0},
        limits={"max_attempts": 5},
    )
    with ranked_stack(tmp_path / "data") as (stack, client):
        undisturbed = adapter_of(client, client.submit(run).id)
        run_id = client.submit(run).id
        kill_rank(stack, 1, lambda: client.run(run_id).progress.step >= 1)
        kill_rank(stack, 0, lambda: client.run(run_id).progress.step >= 3)
        assert adapter_of(client, run_id) == undisturbed
        store = S3ObjectStore.connect(stack.object_store)
        upload(store, tiny_model, "models/tiny/")
        stored = f"s3://{store.bucket}/models/tiny"
        supervised = [
            client.submit(sft_spec_dict(model={"id": model}, train={"steps": STEPS})).id
            for model in (str(tiny_model), stored)
        ]
        assert len({adapter_of(client, run_id) for run_id in supervised}) == 1
        assert not list(stack.options.model_cache.rglob("*.safetensors"))
        torchrun = stack.process("trainer-1")
        torchrun.send_signal(signal.SIGTERM)
        assert torchrun.wait(timeout=60) != signal.SIGKILL
