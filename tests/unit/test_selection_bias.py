"""S5 (thinking-machines-lab/tinker-cookbook#822): nothing is favoured because it is fast.

The run's own decisions are simulated over generators whose jobs take as long as the completions
are. A trainer that is much faster than they are makes the temptation as large as it gets.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import sqrt
from random import Random

from offbeat.contracts.jobs import JobKind
from offbeat.contracts.runs import RunStatus
from offbeat.data.epochs import prompt_row
from services.orchestrator.run_state import Drop, Generate, Group, RunState, Train
from services.orchestrator.runs import next_commands
from tests.specs import spec

NUM_PROMPTS = 40
STEPS = 60
GROUPS_PER_STEP = 4
MAX_VERSIONS = 2
GENERATORS = 6
TRAIN_S = 0.5
KS_1_PERCENT = 1.63
"""Critical value of the two-sample test, times sqrt((n + m) / (n m))."""

Event = tuple[float, int, Sequence[int], int | None]
"""When what ends: groups, and the version that they were sampled with, or none for a step."""


@dataclass
class Simulation:
    """One run from its first version to its last."""

    paced: bool = True
    """Whether admission knows the oldest version under way; AReaL's formula does not."""
    lengths: list[float] = field(default_factory=list)
    """Of every dispatched group."""
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    """Of every trained group."""
    version: int = 0
    ready: dict[int, int] = field(default_factory=dict)
    """Version of each generated group."""
    waiting: list[tuple[Sequence[int], int]] = field(default_factory=list)
    generating: dict[int, int] = field(default_factory=dict)
    """Version that each open group is at least sampled with."""
    training: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)

    def run(self) -> "Simulation":
        """Until every step is done."""
        now, free = 0.0, GENERATORS
        while self.version < STEPS:
            self.decide(now)
            while free and self.waiting:
                groups, _ = self.waiting.pop(0)
                free -= 1
                length = max(self.lengths[index] for index in groups)
                heappush(self.events, (now + length, groups[0], groups, self.version))
            now, _, groups, sampled = heappop(self.events)
            if sampled is None:
                self.version += 1
                self.trained += groups
                self.training = ()
            else:
                free += 1
                self.ready |= dict.fromkeys(groups, sampled)
                for index in groups:
                    del self.generating[index]
        return self

    def decide(self, now: float) -> None:
        """Carry out what the run asks for."""
        for command in next_commands(self.state()):
            match command:
                case Generate(num_groups=count, min_version=version):
                    first = len(self.lengths)
                    groups = range(first, first + count)
                    self.lengths += [length_of(index) for index in groups]
                    self.generating |= dict.fromkeys(groups, version)
                    self.waiting.append((groups, version))
                case Train(base_version=base, indexes=indexes):
                    self.staleness += [base - self.ready.pop(index) for index in indexes]
                    self.training = indexes
                    heappush(self.events, (now + TRAIN_S, -1, indexes, None))
                case Drop(indexes=indexes):
                    self.dropped += indexes
                    for index in indexes:
                        del self.ready[index]
                case _:
                    raise AssertionError(command)

    def state(self) -> RunState:
        """The run as its decisions see it."""
        oldest = min(self.generating.values(), default=None)
        return RunState(
            spec=spec(
                rollout={"groups_per_step": GROUPS_PER_STEP},
                train={"steps": STEPS},
                staleness={"max_versions": MAX_VERSIONS},
            ),
            status=RunStatus.RUNNING,
            prepared=True,
            version=self.version,
            open_jobs={JobKind.TRAIN: 1} if self.training else {},
            generating=len(self.generating),
            oldest_generating=oldest if self.paced else None,
            training=len(self.training),
            ready=[Group(index=i, policy_version=v) for i, v in sorted(self.ready.items())],
            generators=GENERATORS,
        )


def row_of(index: int) -> int:
    return prompt_row(index, num_prompts=NUM_PROMPTS, seed=0, shuffle=True)


def length_of(index: int) -> float:
    """Half of it is the prompt's; the tail is heavy, as that of reasoning is."""
    typical = Random(f"prompt {row_of(index)}").paretovariate(1.2)
    return typical * Random(f"group {index}").uniform(0.5, 1.5)


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference of the two empirical distributions."""
    ordered = sorted(first), sorted(second)
    return max(
        abs(bisect_right(ordered[0], x) / len(first) - bisect_right(ordered[1], x) / len(second))
        for x in (*first, *second)
    )


def ks_critical(first: Sequence[float], second: Sequence[float]) -> float:
    return KS_1_PERCENT * sqrt((len(first) + len(second)) / (len(first) * len(second)))


def test_s5_what_is_trained_is_as_long_as_what_was_dispatched() -> None:
    run = Simulation().run()
    trained = [run.lengths[index] for index in run.trained]
    assert ks_distance(run.lengths, trained) < ks_critical(run.lengths, trained) / 10
    assert run.dropped == []
    assert max(run.staleness) == MAX_VERSIONS, "otherwise nothing was ever nearly too old"


def test_s5_every_prompt_is_trained_equally_often() -> None:
    run = Simulation().run()
    epochs = STEPS * GROUPS_PER_STEP // NUM_PROMPTS
    assert Counter(row_of(index) for index in run.trained) == dict.fromkeys(
        range(NUM_PROMPTS), epochs
    )


def test_s5_without_pacing_the_slow_ones_would_be_dropped() -> None:
    """What the tests above can see: AReaL's formula alone lets the trainer run away from them."""
    run = Simulation(paced=False).run()
    trained = [run.lengths[index] for index in run.trained]
    mean_dropped = sum(run.lengths[index] for index in run.dropped) / len(run.dropped)
    assert mean_dropped > 3 * sum(trained) / len(trained)
    counts = Counter(row_of(index) for index in run.trained)
    assert max(counts.values()) - min(counts.get(row, 0) for row in range(NUM_PROMPTS)) > 1
