"""How many groups may be in flight, and what each one is sampled with: pure functions.

Staleness is bounded twice: here, by never having more groups under way than the next `max_versions`
steps can use, and once more when a group's turn to be trained comes (`runs.py`).
"""

import random

SYNCHRONOUS_JOB_SAMPLES = 32
"""Of a generate job in synchronous mode: enough to fill a batch, few enough to share a step."""


def capacity_groups(
    *,
    version: int,
    oldest: int,
    max_versions: int,
    groups_per_step: int,
    steps: int,
    running: int,
    waiting: int,
    max_inflight: int | None,
) -> int:
    """Groups that may be started now; zero or less means none.

    AReaL's `get_capacity` (arXiv 2505.24298) in groups, with v policy versions made, η =
    max_versions and B = groups_per_step:

        min(max_inflight − running, (η + o + 1)·B − (accepted + running)),  accepted = v·B + waiting

    AReaL has v for o = `oldest`, the oldest version that a group under way may be sampled with (v
    where none is). With o, not more than the next η steps from o can be taken without that group,
    so it is never too old when its turn comes, however slow it is: nothing is dropped for being
    slow, and no prompt is favoured for being fast (tinker-cookbook#822).

    `waiting` counts groups that are generated or being trained and not yet part of a version. What
    the remaining steps cannot use is never started. Counting accepted groups as v·B + waiting, and
    not with a counter of its own, is what keeps a resumed run from starting a burst.
    """
    limit = max_inflight if max_inflight is not None else (max_versions + 1) * groups_per_step
    under_way = version * groups_per_step + waiting + running
    within_staleness = (max_versions + oldest + 1) * groups_per_step - under_way
    still_needed = steps * groups_per_step - under_way
    return min(limit - running, within_staleness, still_needed)


def job_sizes(
    capacity: int, *, groups_per_step: int, generators: int, runs: int, idle: bool
) -> list[int]:
    """Split the capacity into generate jobs of equal size.

    A step's groups are spread evenly over the run's share of the generators, so that they finish
    together. Where many runs share few, a job is a whole step: engines like large batches, and
    fewer workers pull the run's versions. Less than a whole job waits for more capacity, unless the
    run would stand still for it (`idle`).
    """
    share = max(1, generators // max(1, runs))
    size = -(-groups_per_step // share)
    whole, rest = divmod(max(0, capacity), size)
    return [size] * whole + ([rest] if rest and idle and not whole else [])


def synchronous_job_sizes(capacity: int, *, group_size: int) -> list[int]:
    """Split the capacity into generate jobs in a way that depends on the run alone.

    The last bits of a log-probability depend on the batch that it is computed in. With this split a
    synchronous run gives the same bytes however many generators are alive.
    """
    size = max(1, SYNCHRONOUS_JOB_SAMPLES // group_size)
    whole, rest = divmod(max(0, capacity), size)
    return [size] * whole + ([rest] if rest else [])


def group_seed(run_seed: int, index: int) -> int:
    """The seed of a group's samples, 63 bits: it depends on the run's seed and the group only."""
    return random.Random(f"{run_seed}/group/{index}").getrandbits(62)
