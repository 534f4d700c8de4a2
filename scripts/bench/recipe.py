"""The recipe of a run spec in TRL's words, and the spec of the step benchmark."""

from pathlib import Path
from typing import Any

from peft import LoraConfig
from trl.trainer.grpo_config import GRPOConfig

from offbeat.contracts.data_sources import InlineData
from offbeat.contracts.run_spec import (
    ModelSection,
    PythonReward,
    RolloutSection,
    RunSpec,
    TrainSection,
)
from scripts.bench.cases import GROUP_SIZE, GROUPS
from scripts.bench.contender import StepTask

LEARNING_RATE = 1e-4


def bench_spec(task: StepTask) -> RunSpec:
    """The run whose step is measured; rewards are in the samples already."""
    return RunSpec(
        model=ModelSection(id=str(task.model)),
        data=InlineData(source="inline", rows=({"prompt": "unused"},)),
        rewards=(PythonReward(type="python", path="unused:unused"),),
        rollout=RolloutSection(
            group_size=GROUP_SIZE, groups_per_step=GROUPS, max_new_tokens=task.max_new_tokens
        ),
        train=TrainSection(steps=task.repeats + 1, learning_rate=LEARNING_RATE),
    )


def trl_config(spec: RunSpec, *, steps: int, batch: int, output_dir: Path) -> GRPOConfig:
    """The same recipe for `GRPOTrainer`, as a careful user without a GPU would set it.

    What has no counterpart stays at TRL's default; `bf16` is one, and autocasts.
    """
    rollout, train = spec.rollout, spec.train
    return GRPOConfig(
        **shared_config(spec, steps=steps, output_dir=output_dir),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=rollout.samples_per_step // batch,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        loss_type=train.loss,
        scale_rewards="none" if train.advantage == "group_mean" else "group",
        epsilon=train.epsilon_low,
        epsilon_high=train.epsilon_high,
        beta=train.beta,
        shuffle_dataset=False,
    )


def shared_config(spec: RunSpec, *, steps: int, output_dir: Path) -> dict[str, Any]:
    """What all of TRL's trainers are told."""
    train = spec.train
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "model_init_kwargs": {"dtype": spec.model.dtype},
        # TRL's own default saves memory for about a fifth more time.
        "gradient_checkpointing": False,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler,
        "max_grad_norm": train.max_grad_norm,
        "weight_decay": train.weight_decay,
        "max_steps": steps,
        "seed": train.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def trl_lora(spec: RunSpec) -> LoraConfig:
    """The adapter of the same form."""
    return LoraConfig(
        r=spec.adapter.rank,
        lora_alpha=int(spec.adapter.alpha),
        lora_dropout=spec.adapter.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
