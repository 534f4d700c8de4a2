"""The whole product as processes: submit with the CLI, harm it, restart it, read the results."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest
import yaml
from safetensors.numpy import load_file

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import RunStatus, RunView
from offbeat.objects import S3ObjectStore
from scripts.parts import program
from scripts.processes import StackError
from scripts.stack import Stack, StackOptions, running_stack
from tests.specs import sft_spec_dict, spec_dict

pytestmark = pytest.mark.system

RUN_TIMEOUT_S = 180.0
IMPATIENT = {"OFFBEAT_LEASE_S": "5", "OFFBEAT_HEARTBEAT_INTERVAL_S": "1"}
"""A killed worker is missed soon, so that tests do not wait for the default half minute."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        data_dir=tmp_path_factory.mktemp("stack"), generators=2, settings=IMPATIENT
    )
    with running_stack(options, io.StringIO()) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[OffbeatClient]:
    with OffbeatClient(stack.addresses.orchestrator) as client:
        yield client


def tiny_spec(model: Path, **changes: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "model": {"id": str(model)},
        "rollout": {"group_size": 4, "groups_per_step": 2, "max_new_tokens": 6},
        "rewards": [{"type": "regex", "pattern": "[a-m]"}],
        "train": {"steps": 4},
    }
    return spec_dict(**{**sections, **changes})


def cli(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("offbeat"), *arguments, "--url", stack.addresses.orchestrator],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


def wait_for_step(client: OffbeatClient, run_id: str, step: int) -> RunView:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        run = client.run(run_id)
        if run.progress.step >= step:
            return run
        assert not run.status.is_final, run.status_reason
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_from_the_command_line_to_the_adapter(
    stack: Stack, client: OffbeatClient, tiny_model: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "run.yaml"
    evaluated = {"data": {"eval_size": 2}, "eval": {"every_steps": 2}}
    spec.write_text(yaml.safe_dump(tiny_spec(tiny_model, **evaluated)))
    watched = cli(stack, "submit", str(spec), "--watch")
    assert watched.returncode == 0, watched.stdout + watched.stderr
    (run,) = json.loads(cli(stack, "list", "--json").stdout)
    assert (run["status"], run["progress"]["version"]) == ("succeeded", 4)
    series = client.metrics(run["id"]).series
    assert [point.step for point in series["reward"]] == [1, 2, 3, 4]
    assert [point.step for point in series["eval/reward"]] == [0, 2, 4]
    downloaded = cli(stack, "adapter", run["id"], "-o", str(tmp_path / "adapter"))
    assert downloaded.returncode == 0, downloaded.stderr
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


def test_every_step_replays_to_the_same_bytes(
    stack: Stack, client: OffbeatClient, tiny_model: Path
) -> None:
    run_id = client.submit(tiny_spec(tiny_model, train={"steps": 2})).id
    assert client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    for step in (1, 2):
        replayed = cli(stack, "replay", run_id, "--step", str(step), "--json")
        assert replayed.returncode == 0, replayed.stderr
        assert json.loads(replayed.stdout)["is_same"] is True


def test_rollouts_are_what_was_sampled_and_open_in_polars(
    stack: Stack, client: OffbeatClient, tiny_model: Path
) -> None:
    run_id = client.submit(tiny_spec(tiny_model, train={"steps": 1})).id
    assert client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    store = S3ObjectStore.connect(stack.object_store)
    (key, *_) = store.list(f"runs/{run_id}/rollouts/")
    table = polars.read_parquet(store.get(key))
    assert table["completion_ids"].list.len().to_list() == table["logprobs"].list.len().to_list()
    shown = client.rollouts(run_id, step=1).data
    assert len(shown) == 8
    assert {view.trained_step for view in shown} == {1}


def sft_spec_of(model: Path) -> dict[str, Any]:
    return sft_spec_dict(
        model={"id": str(model)},
        data={"eval_size": 2},
        eval={"every_steps": 3},
        train={"steps": 6},
    )


def adapter_hashes(client: OffbeatClient, run_id: str) -> list[str]:
    return [view.adapter_sha256 for view in client.checkpoints(run_id)]


def test_a_supervised_run_from_the_command_line_to_the_adapter_and_on_to_grpo(
    stack: Stack, client: OffbeatClient, tiny_model: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "run.yaml"
    spec.write_text(yaml.safe_dump(sft_spec_of(tiny_model)))
    watched = cli(stack, "submit", str(spec), "--watch")
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert "step 6/6, loss" in watched.stdout
    runs = json.loads(cli(stack, "list", "--json").stdout)
    (run,) = [run for run in runs if run["name"] == "test-sft"]
    assert (run["status"], run["progress"]["version"]) == ("succeeded", 6)
    series = client.metrics(run["id"]).series
    assert [point.step for point in series["loss"]] == [1, 2, 3, 4, 5, 6]
    assert [point.step for point in series["eval_loss"]] == [0, 3, 6]
    downloaded = cli(stack, "adapter", run["id"], "-o", str(tmp_path / "adapter"))
    assert downloaded.returncode == 0, downloaded.stderr
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    replayed = cli(stack, "replay", run["id"], "--step", "6", "--json")
    assert replayed.returncode == 0, replayed.stderr
    assert json.loads(replayed.stdout)["is_same"] is True

    start = {"init_from": f"{run['id']}@6"}
    successor = client.submit(tiny_spec(tiny_model, lora=start, train={"steps": 1})).id
    assert client.wait(successor, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    assert adapter_hashes(client, successor)[0] == adapter_hashes(client, run["id"])[6]


def test_a_killed_trainer_changes_no_byte_of_a_supervised_run(
    stack: Stack, client: OffbeatClient, tiny_model: Path
) -> None:
    undisturbed = client.submit(sft_spec_of(tiny_model)).id
    assert client.wait(undisturbed, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    harmed = client.submit(sft_spec_of(tiny_model)).id
    wait_for_step(client, harmed, 2)
    trainer = stack.process("trainer-1")
    trainer.kill()
    trainer.wait()
    stack.restart("trainer-1")
    assert client.wait(harmed, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
    assert adapter_hashes(client, harmed) == adapter_hashes(client, undisturbed)


def test_a_stack_goes_on_where_it_stopped(tiny_model: Path, tmp_path: Path) -> None:
    options = StackOptions(data_dir=tmp_path / "data", settings=IMPATIENT)
    with running_stack(options, io.StringIO()) as first:
        with (
            pytest.raises(StackError, match="already running"),
            running_stack(options, io.StringIO()),
        ):
            raise AssertionError("a second stack on the same folder was started")
        with OffbeatClient(first.addresses.orchestrator) as client:
            run_id = client.submit(tiny_spec(tiny_model, train={"steps": 8})).id
            wait_for_step(client, run_id, 1)
    with (
        running_stack(options, io.StringIO()) as second,
        OffbeatClient(second.addresses.orchestrator) as client,
    ):
        ended = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
        assert (ended.status, ended.progress.step) == (RunStatus.SUCCEEDED, 8)


def test_a_process_that_ends_takes_the_stack_with_it(tmp_path: Path) -> None:
    """`make up` on one machine: the first exit ends the tree, with the last log lines."""
    command = [sys.executable, "-m", "scripts.stack", "--data-dir", str(tmp_path)]
    command += ["--generators", "0", "--trainers", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    (victim,) = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "services.weight_proxy"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    subprocess.run(["kill", "-9", victim], check=True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "weight_proxy ended with exit code -9. The last lines of" in errors
    left = subprocess.run(["pgrep", "-P", str(process.pid)], check=False, capture_output=True)
    assert left.stdout == b""
