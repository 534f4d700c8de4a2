"""Processes that are killed, and processes that freeze and wake up late."""

import signal
import time
from random import Random

from scripts.chaos.fleet import GENERATORS, ORCHESTRATOR, S3, TRAINER, VALKEY, WEIGHT_PROXIES, Fleet
from scripts.chaos.harm import Harm, Strike

FREEZE_S = 20.0
"""Four leases of the suite: whoever wakes up after it has lost all that it held."""
ROLES = {
    "generator": GENERATORS,
    "trainer": (TRAINER,),
    "orchestrator": (ORCHESTRATOR,),
    "weight-proxy": WEIGHT_PROXIES,
    "s3": (S3,),
}


def kill(*names: str) -> Strike:
    """SIGKILL to one of them; it is started again at once."""

    def strike(fleet: Fleet, random: Random) -> float:
        fleet.kill(random.choice(names))
        return time.time()

    return strike


def kill_all(*names: str) -> Strike:
    """SIGKILL to all of them at once."""

    def strike(fleet: Fleet, _: Random) -> float:
        for name in names:
            fleet.kill(name)
        return time.time()

    return strike


def freeze(*names: str) -> Strike:
    """SIGSTOP to one of them, SIGCONT later."""

    def strike(fleet: Fleet, random: Random) -> float:
        name = random.choice(names)
        fleet.signal(name, signal.SIGSTOP)
        struck_at = time.time()
        time.sleep(FREEZE_S)
        fleet.signal(name, signal.SIGCONT)
        return struck_at

    return strike


def _wait(_: Fleet, __: Random) -> float:
    """The run does it to itself: see `poison.py`."""
    return time.time()


PROCESS_HARMS = (
    *(Harm(name=f"{role} killed", strike=kill(*names)) for role, names in ROLES.items()),
    Harm(name="both generators killed", strike=kill_all(*GENERATORS)),
    Harm(name="both weight-proxies killed", strike=kill_all(*WEIGHT_PROXIES)),
    *(
        Harm(name=f"{role} frozen for {FREEZE_S:.0f} s", strike=freeze(*names))
        for role, names in {**ROLES, "valkey": (VALKEY,)}.items()
    ),
    Harm(name="a prompt that kills its generator", strike=_wait, poisoned=True),
)
