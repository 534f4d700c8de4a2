"""A whole run of the learning benchmark: what is asked of a contender, and what it reports."""

from offbeat.contracts.base import Contract
from offbeat.contracts.run_spec import RunSpec
from scripts.bench.figures import RewardPoint, time_to_reward

REWARD_GOAL = 0.6
GOAL_WINDOW = 5


class LearningTask(Contract):
    """Learn until the goal is reached, or for all the steps of the spec."""

    spec: RunSpec
    model: str
    """The folder of the base model."""
    launched_at: float
    """Unix time at which the contender's first process was started."""
    trl_batch: int


class LearningPoint(Contract):
    """The mean reward of one step, and the Unix time at which the step was done."""

    at: float
    reward: float


class LearningRun(Contract):
    """How a run went. Start-up is what lies between the two beginnings: imports, the model's
    loading, and with Offbeat the services, the prompts and version 0."""

    launched_at: float
    began_at: float
    """When sampling for the first step could begin."""
    points: tuple[LearningPoint, ...]

    def curve(self, *, with_start_up: bool) -> list[RewardPoint]:
        """The rewards by the seconds since the beginning."""
        origin = self.launched_at if with_start_up else self.began_at
        return [RewardPoint(time_s=one.at - origin, reward=one.reward) for one in self.points]

    def wall_s(self, *, with_start_up: bool) -> float | None:
        """Seconds until the goal; None where it was not reached."""
        return time_to_reward(self.curve(with_start_up=with_start_up), REWARD_GOAL, GOAL_WINDOW)


def learning_spec(example: RunSpec, seed: int, steps_max: int) -> RunSpec:
    """The example with this seed: prompts in the order of their table, no evaluation."""
    return example.model_copy(
        update={
            "data": example.data.model_copy(
                update={"seed": seed, "eval_size": 0, "shuffle": False}
            ),
            "train": example.train.model_copy(update={"seed": seed, "steps": steps_max}),
            "eval": example.eval.model_copy(update={"every_steps": 0}),
        }
    )
