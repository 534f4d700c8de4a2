"""Runs on the stack: one while a container of each service is killed, one of all weights."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus, RunView
from offbeat.errors import OffbeatError
from offbeat.specs import load_spec
from scripts.compose.commands import ComposeTestError
from scripts.compose.stack import ComposeStack
from scripts.compose.waiting import wait_until
from scripts.processes import end

VICTIMS = ("generator", "trainer", "weight-proxy", "orchestrator", "redis", "postgres", "minio")
STEPS = 16
STEP_TIMEOUT_S = 600.0
"""Until a step follows the death of a container: a lease that runs out, a model that loads."""
WORKERS_TIMEOUT_S = 180.0
FULL_EXAMPLE = Path("examples/sft_full.toml")
FULL_TIMEOUT_S = 900.0


def trained_while_parts_die(stack: ComposeStack, *, generators: int) -> str:
    """The id of the run, which has learned."""
    smoke = subprocess.Popen(
        (sys.executable, "-m", "scripts.smoke", "--url", stack.url, "--steps", str(STEPS)),
        env={**stack.commands.environment, "OFFBEAT_API_KEY": stack.api_key},
        stdin=subprocess.DEVNULL,
    )
    try:
        _wait_for_step(stack, smoke, 1)
        for service in VICTIMS:
            print(f"killing {service} …", flush=True)
            stack.kill(service)
            _wait_for_step(stack, smoke, _run(stack).progress.step + 1)
        print("replacing the control plane, as an upgrade does …", flush=True)
        stack.upgrade()
        _wait_for_step(stack, smoke, _run(stack).progress.step + 1)
        print(f"scaling to {generators} generators …", flush=True)
        stack.up("--no-recreate", "--scale", f"generator={generators}")
        wait_until(
            lambda: _alive_generators(stack) >= generators,
            WORKERS_TIMEOUT_S,
            lambda: f"{_alive_generators(stack)} generators report",
        )
        if smoke.wait():
            raise ComposeTestError("the run did not learn")
    finally:
        end([smoke])
    return _run(stack).id


def short_and_large(spec: RunSpec) -> RunSpec:
    """Two steps, each with a validation and a state, beside which a trainer needs most memory."""
    steps = {"steps": 2, "warmup_steps": 0, "checkpoint_every": 1}
    train = spec.train.model_copy(update=steps)
    evaluation = spec.eval.model_copy(update={"every_steps": 1})
    return spec.model_copy(update={"name": "full", "train": train, "eval": evaluation})


def all_weights_trained(stack: ComposeStack) -> None:
    """Raises `ComposeTestError` unless such a run succeeds and its model can be fetched."""
    with stack.client() as client, TemporaryDirectory() as folder:
        run_id = client.submit(short_and_large(load_spec(FULL_EXAMPLE))).id
        wait_until(
            lambda: client.run(run_id).status.is_final,
            FULL_TIMEOUT_S,
            lambda: f"{run_id} is at step {client.run(run_id).progress.step}",
        )
        run = client.run(run_id)
        if run.status != RunStatus.SUCCEEDED:
            raise ComposeTestError(f"{run_id} has {run.status}: {run.status_reason}")
        client.download_model(run_id, folder)


def _run(stack: ComposeStack) -> RunView:
    """The one run that there is."""
    with stack.client() as client:
        return client.runs().data[0]


def _wait_for_step(stack: ComposeStack, smoke: "subprocess.Popen[bytes]", step: int) -> None:
    def is_done() -> bool:
        if smoke.poll():
            raise ComposeTestError("the run ended before it learned")
        try:
            run = _run(stack)
        except (OffbeatError, IndexError):
            return False
        return run.progress.step >= step or run.status.is_final

    wait_until(is_done, STEP_TIMEOUT_S, lambda: f"step {step} was not done")


def _alive_generators(stack: ComposeStack) -> int:
    with stack.client() as client:
        workers = client.workers()
    return sum(
        worker.report.role == WorkerRole.GENERATOR and worker.status == "alive"
        for worker in workers
    )
