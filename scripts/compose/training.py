"""A run on the stack, while a container of each service is killed."""

import subprocess
import sys

from offbeat.contracts.jobs import WorkerRole
from offbeat.contracts.runs import RunView
from offbeat.errors import OffbeatError
from scripts.compose.commands import ComposeTestError
from scripts.compose.stack import ComposeStack
from scripts.compose.waiting import wait_until
from scripts.processes import end

VICTIMS = ("generator", "trainer", "weight-proxy", "orchestrator", "redis", "postgres", "minio")
STEPS = 16
STEP_TIMEOUT_S = 600.0
"""Until a step follows the death of a container: a lease that runs out, a model that loads."""
WORKERS_TIMEOUT_S = 180.0


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
