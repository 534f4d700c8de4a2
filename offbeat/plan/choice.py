"""Which settings a run gets where its spec leaves them open: the fastest that fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from offbeat.contracts.plan import Sharding, Verdict
from offbeat.plan.architecture import Architecture
from offbeat.plan.gpus import Cluster
from offbeat.plan.memory import Moment, peak
from offbeat.plan.setup import OFFBEAT, Setup
from offbeat.plan.speed import StepTime, step_time
from offbeat.plan.wanted import Wanted

BAND = 0.15
"""The formulas are within it of all published measurements."""
TOKEN_BUDGETS = (16384, 8192, 4096, 2048, 1024, 512, 256)
"""Above 8,192 or so a GPU's matrix units are full, and larger batches save gathering alone."""
_ORDER: dict[Verdict, int] = {"fits": 0, "tight": 1, "does not fit": 2}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setup, what it takes and how it does."""

    setup: Setup
    sharding: Sharding
    peak: Moment
    micro_batches: int
    """Of a step, on each rank, with sequences of full length."""
    time: StepTime
    verdict: Verdict

    @property
    def step_s(self) -> float:
        """Without what crosses between nodes once a step."""
        return self.time.step_s(self.micro_batches)


def choose(model: Architecture, wanted: Wanted, cluster: Cluster) -> Choice:
    """The best of all setups that the wish leaves open: one that fits, if possible without offload,
    and of those the fastest; where none fits, the smallest."""
    choices = [_weighed(model, setup, wanted, cluster) for setup in _setups(wanted, cluster)]
    return min(choices, key=_rank)


def verdict_of(total_bytes: float, usable_bytes: float) -> Verdict:
    """`tight` where the memory is within the band of the estimate."""
    if total_bytes * (1 + BAND) <= usable_bytes:
        return "fits"
    return "tight" if total_bytes * (1 - BAND) <= usable_bytes else "does not fit"


def budgets(wanted: Wanted, cluster: Cluster) -> list[int]:
    """Token budgets to choose from, largest first: not above what a rank has in a step, not below
    the longest sequence."""
    shortest = wanted.sequence_tokens
    if wanted.token_budget is not None:
        return [max(wanted.token_budget, shortest)]
    a_rank = max(wanted.step_tokens // cluster.num_gpus, shortest)
    return [*(size for size in TOKEN_BUDGETS if shortest < size < 2 * a_rank), shortest]


def _setups(wanted: Wanted, cluster: Cluster) -> Iterator[Setup]:
    shards = dict.fromkeys((cluster.gpus_per_node, cluster.num_gpus))
    for num_shards in shards:
        for is_offloaded in _open(wanted.is_offloaded):
            for is_checkpointed in _open(wanted.is_checkpointed):
                for token_budget in budgets(wanted, cluster):
                    yield wanted.setup(
                        token_budget=token_budget,
                        is_checkpointed=is_checkpointed,
                        is_offloaded=is_offloaded,
                        num_shards=num_shards,
                    )


def _open(asked: bool | None) -> tuple[bool, ...]:
    return (False, True) if asked is None else (asked,)


def _weighed(model: Architecture, setup: Setup, wanted: Wanted, cluster: Cluster) -> Choice:
    moment = peak(model, setup, OFFBEAT)
    return Choice(
        setup=setup,
        sharding=_sharding(setup, cluster),
        peak=moment,
        micro_batches=ceil(wanted.step_tokens / (cluster.num_gpus * setup.token_budget)),
        time=step_time(model, setup, OFFBEAT, cluster, sequence_tokens=wanted.sequence_tokens),
        verdict=verdict_of(moment.total, cluster.gpu.usable_bytes),
    )


def _sharding(setup: Setup, cluster: Cluster) -> Sharding:
    if setup.num_shards == 1:
        return "none"
    return "within nodes" if setup.num_shards <= cluster.gpus_per_node else "across nodes"


def _rank(choice: Choice) -> tuple[int, bool, float]:
    """Of two that are equally fast to the millisecond, the first, with the larger budget, wins."""
    does_fit = choice.verdict != "does not fit"
    by = round(choice.step_s, 3) if does_fit else choice.peak.total
    return _ORDER[choice.verdict], does_fit and choice.setup.is_offloaded, by
