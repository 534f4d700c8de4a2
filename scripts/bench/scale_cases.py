"""The cases of the load benchmark: the same work for fleets of growing size.

An hour of work is done in minutes: ten steps of each run, which take six minutes in that hour. What
work causes (jobs, versions, pulls) comes `pace` times as fast as in that hour; what time causes
(reports, heartbeats, polls) keeps its own pace.
"""

from dataclasses import dataclass
from math import ceil

from offbeat.contracts.data_sources import InlineData
from offbeat.contracts.run_spec import (
    ExactMatchReward,
    LoraSection,
    ModelSection,
    RetentionSection,
    RolloutSection,
    RunSpec,
    TrainSection,
)

REAL_STEP_S = 360.0
"""A step of each of many runs on a large model with long answers."""
GROUPS_PER_STEP = 8
"""The default of a run; with that many generators for each run, each group is a job."""
GROUP_SIZE = 8
BUSY = 0.8
"""Share of the time for which generators and trainers would compute if they never waited."""
RUNS_PER_TRAINER = 5
KEPT_VERSIONS, KEPT_STATES = 5, 2
"""What retention leaves of a run; few, so that even a short run gives something up."""
ROLLOUTS_KEPT_S = 900.0
"""For so long of the hour samples stay."""
SECONDS_A_DAY = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class ScaleCase:
    """So many runs of so many steps on so many generators."""

    generators: int
    runs: int
    steps: int
    step_s: float
    """How long a step of each run takes where nothing waits for the services."""

    @property
    def name(self) -> str:
        """As reports and folders call it."""
        return f"{self.generators} generators, {self.runs} runs"

    @property
    def trainers(self) -> int:
        """A few runs share one."""
        return ceil(self.runs / RUNS_PER_TRAINER)

    @property
    def work_s(self) -> float:
        """How long all of it takes then."""
        return self.steps * self.step_s

    @property
    def pace(self) -> float:
        """By how much work is faster than in the hour that it stands for."""
        return REAL_STEP_S / self.step_s

    @property
    def group_s(self) -> float:
        """How long a generator takes for a group."""
        return BUSY * self.generators * self.step_s / (self.runs * GROUPS_PER_STEP)

    @property
    def train_s(self) -> float:
        """The length of a step."""
        return BUSY * self.trainers * self.step_s / self.runs


def scale_spec(case: ScaleCase, number: int) -> RunSpec:
    """One of the case's runs; nothing of it is computed."""
    return RunSpec(
        name="scale",
        model=ModelSection(id="simulated"),
        lora=LoraSection(rank=1, alpha=2),
        data=InlineData(
            source="inline",
            rows=({"prompt": "1 + 1 =", "answer": "2"},),
            seed=number,
        ),
        rewards=(ExactMatchReward(type="exact_match"),),
        rollout=RolloutSection(group_size=GROUP_SIZE, groups_per_step=GROUPS_PER_STEP),
        train=TrainSection(steps=case.steps, learning_rate=1e-4),
        retention=RetentionSection(
            keep_last=KEPT_VERSIONS,
            keep_last_states=KEPT_STATES,
            keep_every=0,
            rollout_days=ROLLOUTS_KEPT_S / case.pace / SECONDS_A_DAY,
        ),
    )
