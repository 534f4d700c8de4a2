"""Whole runs whose generator samples with a real vLLM."""

import io
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.run_spec import EvalSection
from offbeat.contracts.runs import RunStatus
from offbeat.specs import load_spec
from scripts.demo import EXAMPLE
from scripts.stack import Stack, StackOptions, running_stack
from tests.specs import spec_dict
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

RUN_TIMEOUT_S = 3000.0
STEPS = 12
WINDOW = 4
"""Steps at either end whose rewards are averaged: 128 samples."""
SETTINGS = {
    "OFFBEAT_VLLM_MAX_LORAS": "4",
    "OFFBEAT_VLLM_MAX_LORA_RANK": "16",
    # Prompts of 50 tokens are shared in a group only where the blocks of the cache are small.
    "OFFBEAT_VLLM_ARGS": "--block-size 32",
}


@contextmanager
def stack_with_vllm(vllm_python: Path, folder: Path) -> Iterator[tuple[Stack, OffbeatClient]]:
    options = StackOptions(data_dir=folder, vllm_python=vllm_python, settings=SETTINGS)
    with (
        running_stack(options, io.StringIO()) as stack,
        OffbeatClient(stack.addresses.orchestrator) as client,
    ):
        yield stack, client


def vllm_pids(stack: Stack) -> list[int]:
    """The server of the generator: vLLM's own workers are its children."""
    found = subprocess.run(
        ["pgrep", "-P", str(stack.process("generator-1").pid), "-f", "vllm.entrypoints"],
        check=False,
        capture_output=True,
        text=True,
    )
    return [int(pid) for pid in found.stdout.split()]


def test_killing_vllm_only_costs_time(vllm_python: Path, small_model: Path, tmp_path: Path) -> None:
    """Invariant 4, for the server of an engine."""
    spec = spec_dict(
        model={"id": str(small_model)},
        rollout={"group_size": 4, "groups_per_step": 2, "max_new_tokens": 6},
        rewards=[{"type": "regex", "pattern": "[a-m]"}],
        train={"steps": 6},
        staleness={"max_versions": 1},
    )
    with stack_with_vllm(vllm_python, tmp_path) as (stack, client):
        run_id = client.submit(spec).id
        wait_until(lambda: client.run(run_id).progress.step >= 2, RUN_TIMEOUT_S)
        (victim,) = vllm_pids(stack)
        os.kill(victim, signal.SIGKILL)
        assert client.wait(run_id, timeout_s=RUN_TIMEOUT_S).status is RunStatus.SUCCEEDED
        (successor,) = vllm_pids(stack)
        versions = [checkpoint.version for checkpoint in client.checkpoints(run_id)]
        kinds = {event.kind for event in client.iter_events(run_id)}
    assert successor != victim
    assert versions == list(range(7))
    assert not kinds & {"job_dead", "job_failed", "canary_failed"}


def test_a_model_learns(vllm_python: Path, tmp_path: Path) -> None:
    """The task of `examples/chain_sum.toml` in few and small steps."""
    example = load_spec(EXAMPLE)
    spec = example.model_copy(
        update={
            "data": example.data.model_copy(update={"eval_size": 0}),
            "eval": EvalSection(),
            "rollout": example.rollout.model_copy(update={"groups_per_step": 4}),
            "train": example.train.model_copy(update={"steps": STEPS, "learning_rate": 5e-4}),
        }
    )
    with stack_with_vllm(vllm_python, tmp_path) as (_, client):
        run_id = client.submit(spec).id
        ended = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
        assert ended.status is RunStatus.SUCCEEDED, ended.status_reason
        rewards = [point.value for point in client.metrics(run_id).series["reward"]]
        refused = [event for event in client.iter_events(run_id) if event.kind == "canary_failed"]
    assert len(rewards) == STEPS
    assert fmean(rewards[-WINDOW:]) > fmean(rewards[:WINDOW]), rewards
    assert refused == []
