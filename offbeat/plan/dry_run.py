"""A dry run of the trainer, in a process of its own: only there is torch needed."""

import subprocess
import sys

from pydantic import ValidationError

from offbeat.contracts.base import Contract
from offbeat.contracts.plan import DryRun
from offbeat.errors import InvalidRequestError, UnavailableError
from offbeat.plan.architecture import Architecture
from offbeat.plan.setup import Setup

MODULE = "services.trainer.dry_run"
"""By name: this package knows no service."""
TIMEOUT_S = 900.0
"""A model of 70B parameters is counted in some minutes."""
REASON_CHARS_MAX = 500


class DryRunRequest(Contract):
    """What the trainer's process is told."""

    model: Architecture
    setup: Setup


def dry_run(model: Architecture, setup: Setup) -> DryRun:
    """Count the tensors of a step of one rank.

    Raises `InvalidRequestError` for what a dry run does not know, `UnavailableError` where it
    cannot be made here.
    """
    if setup.method == "qlora" or setup.is_offloaded or model.num_experts > 1:
        raise InvalidRequestError(
            "a dry run knows neither nf4 nor experts, and cannot tell what is offloaded: leave it "
            "out, or plan without offload"
        )
    request = DryRunRequest(model=model, setup=setup)
    try:
        done = subprocess.run(
            (sys.executable, "-m", MODULE),
            input=request.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"the dry run did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnavailableError(
            "the dry run cannot be made here: it needs the packages of a trainer "
            f"(pip install 'offbeat[worker]'); {reason[:REASON_CHARS_MAX]}"
        )
    try:
        return DryRun.model_validate_json(done.stdout)
    except ValidationError as error:
        raise UnavailableError(f"{MODULE} does not answer as this version expects") from error
