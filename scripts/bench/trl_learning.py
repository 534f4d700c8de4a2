"""TRL's run: `GRPOTrainer` as it comes, on the same prompts, rewards and recipe.

python -m scripts.bench.trl_learning <task.json> <run.json>
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar
from trl.trainer.grpo_trainer import GRPOTrainer

from offbeat.contracts.run_spec import RunSpec
from offbeat.data.prompts import build_prompts
from offbeat.data.rows import checked_row
from offbeat.data.sources import SOURCES
from offbeat.models import load_tokenizer
from offbeat.rewards.scorer import RewardScorer
from offbeat.rewards.scores import RewardSample
from offbeat.tables import PromptRow
from scripts.bench.learning_run import LearningPoint, LearningRun, LearningTask
from scripts.bench.recipe import trl_config, trl_lora

Chat = list[dict[str, str]]


class RewardWatch(TrainerCallback):
    """Notes the mean reward of every step, and ends the training once the goal is reached."""

    def __init__(self, launched_at: float) -> None:
        self._launched_at = launched_at
        self._began_at = launched_at
        self._points: list[LearningPoint] = []

    @property
    def run(self) -> LearningRun:
        """The run so far."""
        return LearningRun(
            launched_at=self._launched_at, began_at=self._began_at, points=tuple(self._points)
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """All is loaded."""
        self._began_at = time.time()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """A step is done: TRL logs each one, and a summary at the end."""
        logs = state.log_history[-1]
        if "reward" not in logs:
            return
        point = LearningPoint(at=time.time(), reward=float(logs["reward"]))
        self._points.append(point)
        seconds = point.at - self._launched_at
        print(
            f"    step {len(self._points)}: {seconds:.1f} s, reward {point.reward:.2f}", flush=True
        )
        control.should_training_stop = self.run.wall_s(with_start_up=True) is not None


class SameRewards:
    """The run's own rewards as TRL's reward function."""

    __name__ = "reward"

    def __init__(self, spec: RunSpec, prompts: Sequence[PromptRow], scorer: RewardScorer) -> None:
        self._parts = spec.rewards
        self._prompts = prompts
        self._scorer = scorer

    def __call__(
        self,
        completions: list[Chat],
        completion_ids: list[list[int]],
        row: list[int],
        **_: object,
    ) -> list[float | None]:
        """One reward a completion."""
        samples = [
            RewardSample(
                completion=chat[0]["content"],
                completion_ids=tuple(ids),
                columns=self._prompts[place].columns,
            )
            for chat, ids, place in zip(completions, completion_ids, row, strict=True)
        ]
        return [score.reward for score in self._scorer.score(self._parts, samples).scores]


def learn(task: LearningTask) -> LearningRun:
    """Train until the goal or the last step."""
    spec, folder = task.spec, Path(task.model)
    rows = SOURCES[spec.data.source](spec.data, None, checked_row)
    tokenizer = load_tokenizer(folder, spec.model.chat_template)
    prompts, _ = build_prompts(spec.data, rows, tokenizer, None)
    chats = [[{"role": "user", "content": str(prompt.columns["prompt"])}] for prompt in prompts]
    watch = RewardWatch(task.launched_at)
    with TemporaryDirectory() as output_dir, RewardScorer() as scorer:
        trainer = GRPOTrainer(
            model=task.model,
            reward_funcs=SameRewards(spec, prompts, scorer),
            args=trl_config(
                spec, steps=spec.train.steps, batch=task.trl_batch, output_dir=Path(output_dir)
            ),
            train_dataset=Dataset.from_dict({"prompt": chats, "row": list(range(len(chats)))}),
            peft_config=trl_lora(spec),
            callbacks=[watch],
        )
        trainer.train()
    return watch.run


def main() -> None:
    """Read the task, write the run."""
    task_path, run_path = map(Path, sys.argv[1:])
    disable_progress_bar()
    run = learn(LearningTask.model_validate_json(task_path.read_bytes()))
    run_path.write_text(run.model_dump_json())


if __name__ == "__main__":
    main()
