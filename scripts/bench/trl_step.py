"""TRL's training step: the loop of `GRPOTrainer`, handed the samples in place of generating them.

A step is measured from `on_step_begin` to `on_step_end`: batch, advantages, forward, backward,
clipping and optimizer.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.grpo_trainer import GRPOTrainer

from offbeat.contracts.rollouts import Rollout
from scripts.bench.contender import (
    WARM_UP_STEPS,
    StepMeasurement,
    StepTask,
    Stopwatch,
    memory_bytes,
    serve,
)
from scripts.bench.recipe import bench_spec, trl_config, trl_lora


class StepTimer(TrainerCallback):
    """Notes the seconds of every optimizer step."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """The batch is fetched next."""
        self._stopwatch.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """The optimizer has stepped."""
        self._stopwatch.stop()


class GivenRollouts:
    """TRL's `rollout_func`: the prompt is the number of its group."""

    def __init__(self, groups: list[tuple[Rollout, ...]]) -> None:
        self._groups = groups

    def __call__(self, prompts: list[str], _: GRPOTrainer) -> dict[str, list[object]]:
        """The samples, in the order in which TRL repeats the prompts."""
        seen = dict.fromkeys(prompts, 0)
        samples: list[Rollout] = []
        for prompt in prompts:
            samples.append(self._groups[int(prompt)][seen[prompt]])
            seen[prompt] += 1
        return {
            "prompt_ids": [list(sample.prompt_ids) for sample in samples],
            "completion_ids": [list(sample.completion_ids) for sample in samples],
            "logprobs": [list(sample.logprobs) for sample in samples],
            "given_reward": [sample.reward for sample in samples],
        }


def given_reward(given_reward: list[float | None], **_: object) -> list[float | None]:
    """The reward that the sample came with."""
    return given_reward


def measure(task: StepTask) -> StepMeasurement:
    """Train on the same samples step after step."""
    spec, groups, stopwatch = bench_spec(task), task.groups(), Stopwatch()
    with TemporaryDirectory() as output_dir:
        steps = WARM_UP_STEPS + task.repeats
        trainer = GRPOTrainer(
            model=str(task.model),
            reward_funcs=given_reward,
            args=trl_config(spec, steps=steps, batch=task.trl_batch, output_dir=Path(output_dir)),
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(groups))]}),
            peft_config=trl_lora(spec),
            rollout_func=GivenRollouts(groups),
            callbacks=[StepTimer(stopwatch)],
        )
        loaded_bytes = memory_bytes("VmRSS")
        trainer.train()
    samples = [sample for group in groups for sample in group]
    return StepMeasurement(
        seconds=stopwatch.seconds,
        cpu_seconds=stopwatch.cpu_seconds,
        loaded_bytes=loaded_bytes,
        peak_bytes=memory_bytes("VmHWM"),
        forwarded_tokens=sum(len(one.prompt_ids) + len(one.completion_ids) for one in samples),
        scored_tokens=sum(len(one.completion_ids) for one in samples),
    )


if __name__ == "__main__":
    serve(StepTask, measure)
