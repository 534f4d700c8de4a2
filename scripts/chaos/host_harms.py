"""The machine under a process: a full disk, and a clock that jumps.

A full disk is a limit of the process on the size of the files it writes (`RLIMIT_FSIZE` of 0): any
write to a file fails, with EFBIG where a full disk says ENOSPC, also to its log. It needs no root
and hits one process only. The clock is libfaketime's, which reads its offset from a file.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random

from libfaketime import get_reload_information

from scripts.chaos.fleet import GENERATORS, ORCHESTRATOR, TRAINER, WEIGHT_PROXIES, Fleet
from scripts.chaos.harm import OUTAGE_S, Harm, Strike

RIGHT = "+0\n"
"""No offset, as libfaketime reads it."""
JUMPS_S = (-3600, 3600)
"""Far more than leases and messages last, and than the 15 minutes that S3 lets a signature be
off."""


def fill_disk(*names: str) -> Strike:
    """Let no write of one of them succeed for a while."""

    def strike(fleet: Fleet, random: Random) -> float:
        pid = fleet.pid(random.choice(names))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        struck_at = time.time()
        time.sleep(OUTAGE_S)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
        return struck_at

    return strike


def _offset_file(fleet: Fleet) -> Path:
    return fleet.stack.options.data_dir / "clock"


def own_clock(name: str) -> Callable[[Fleet], AbstractContextManager[None]]:
    """The part runs on a clock of its own, which shows the right time at first."""

    @contextmanager
    def around(fleet: Fleet) -> Iterator[None]:
        file = _offset_file(fleet)
        file.write_text(RIGHT)
        _, preload = get_reload_information()
        with fleet.started_with(name, **preload, FAKETIME_TIMESTAMP_FILE=str(file)):
            fleet.settle()
            yield

    return around


def _jump(fleet: Fleet, random: Random) -> float:
    """To a wrong time, and back: a machine without NTP, and one whose NTP catches up."""
    file = _offset_file(fleet)
    file.write_text(f"{random.choice(JUMPS_S):+d}\n")
    struck_at = time.time()
    time.sleep(OUTAGE_S)
    file.write_text(RIGHT)
    return struck_at


HOST_HARMS = (
    Harm(name="disk full under a generator", strike=fill_disk(*GENERATORS)),
    Harm(name="disk full under a weight-proxy", strike=fill_disk(*WEIGHT_PROXIES)),
    Harm(name="disk full under the orchestrator", strike=fill_disk(ORCHESTRATOR)),
    Harm(name="clock of the orchestrator jumps", around=own_clock(ORCHESTRATOR), strike=_jump),
    Harm(name="clock of the trainer jumps", around=own_clock(TRAINER), strike=_jump),
    Harm(name="clock of a generator jumps", around=own_clock(GENERATORS[0]), strike=_jump),
)
