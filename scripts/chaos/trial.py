"""One moment: a run is started, harmed, waited for, and what is left of it is checked."""

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import RunStatus
from scripts.chaos.collect import collect
from scripts.chaos.fleet import Fleet
from scripts.chaos.harm import Harm
from scripts.chaos.history import History
from scripts.chaos.invariants import violations
from scripts.chaos.moments import Moment
from scripts.chaos.poison import POISON, REWARD_PATH
from scripts.processes import StackError

STEPS = 12
POISONED_STEPS = 4
NUM_PROMPTS = 8
POISON_ROW = 2
"""The prompt of the third group, as prompts come in their order."""
RUN_TIMEOUT_S = 180.0
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of a moment."""

    moment: Moment
    ended: bool
    """Whether the run succeeded."""
    recovery_s: float | None
    """From the harm to the next version; none where no version was left to publish."""
    jobs_redone: int
    violations: tuple[str, ...]
    byte_equal: bool | None
    """Whether a synchronous run gave the adapter of the undisturbed one; None for other runs."""
    wall_s: float


def run_spec(model: Path, max_versions: int, *, poisoned: bool = False) -> RunSpec:
    """The run that is harmed: small, seeded, with prompts in their order. A step of a synchronous
    one is two generate jobs of different sizes, so that both generators share it."""
    prompts = [f"{number} + 1 =" for number in range(NUM_PROMPTS)]
    reward: dict[str, object] = {"type": "regex", "pattern": "[a-m]"}
    if poisoned:
        prompts[POISON_ROW] = POISON
        reward = {"type": "python", "path": REWARD_PATH}
    return RunSpec.model_validate(
        {
            "name": "chaos",
            "model": {"id": str(model), "dtype": "float32"},
            "lora": {"rank": 2, "alpha": 4},
            "data": {
                "source": "inline",
                "rows": [{"prompt": prompt} for prompt in prompts],
                "shuffle": False,
            },
            "rewards": [reward],
            "rollout": {
                "group_size": 4 if max_versions else 16,
                "groups_per_step": 2 if max_versions else 3,
                "max_new_tokens": 6,
            },
            "train": {"steps": POISONED_STEPS if poisoned else STEPS, "learning_rate": 0.01},
            "staleness": {"max_versions": max_versions},
            # Every byte is wanted afterwards.
            "retention": {"keep_last": STEPS, "keep_last_states": STEPS},
        }
    )


def undisturbed(fleet: Fleet, model: Path) -> str:
    """The hash of the adapter that a synchronous run makes when nothing happens."""
    run_id = fleet.client.submit(run_spec(model, 0)).id
    fleet.client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
    history = collect(fleet, run_id)
    if found := violations(history):
        raise StackError(f"an undisturbed run went wrong: {'; '.join(found)}")
    return history.versions[-1].adapter_sha256


def try_moment(
    fleet: Fleet, model: Path, moment: Moment, harm: Harm, expected_sha256: str
) -> Trial:
    """Do harm to a run of its own. Raises `StackError` where a part does not come back."""
    began = time.monotonic()
    random = Random(moment.seed)
    fleet.settle()
    with harm.around(fleet):
        spec = run_spec(model, moment.max_versions, poisoned=harm.poisoned)
        run_id = fleet.client.submit(spec).id
        if not harm.poisoned:
            _wait_for_version(fleet, run_id, moment.after_version)
            time.sleep(moment.delay_s)
        struck_at = harm.strike(fleet, random)
        faults = [] if _ends(fleet, run_id) else ["the run did not end"]
        fleet.heal()
    history = collect(fleet, run_id)
    faults += violations(history)
    byte_equal = None
    if moment.max_versions == 0 and not harm.poisoned:
        byte_equal = bool(history.versions) and (
            history.versions[-1].adapter_sha256 == expected_sha256
        )
        if not byte_equal:
            faults.append("the final adapter is not that of the undisturbed run")
    return Trial(
        moment=moment,
        ended=history.status == RunStatus.SUCCEEDED,
        recovery_s=_recovery_s(history, struck_at),
        jobs_redone=history.jobs_redone,
        violations=tuple(faults),
        byte_equal=byte_equal,
        wall_s=time.monotonic() - began,
    )


def _wait_for_version(fleet: Fleet, run_id: str, version: int) -> None:
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while (fleet.client.run(run_id).progress.version or 0) < version:
        if time.monotonic() > deadline:
            raise StackError(f"{run_id} never came to version {version}, before any harm")
        time.sleep(POLL_S)


def _ends(fleet: Fleet, run_id: str) -> bool:
    """Whether the run ends in time; one that does not is cancelled."""
    try:
        fleet.client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
    except TimeoutError:
        fleet.client.cancel(run_id)
        return False
    return True


def _recovery_s(history: History, struck_at: float) -> float | None:
    times = [record.published_at - struck_at for record in history.versions]
    return min((seconds for seconds in times if seconds > 0), default=None)


def failed_trial(moment: Moment, reason: str) -> Trial:
    """A moment after which nothing could be read any more."""
    return Trial(
        moment=moment,
        ended=False,
        recovery_s=None,
        jobs_redone=0,
        violations=(reason,),
        byte_equal=None,
        wall_s=0.0,
    )
