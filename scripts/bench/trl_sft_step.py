"""TRL's supervised step: `SFTTrainer` on the same examples, as accelerate runs it on one process or
on several."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from datasets import Dataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from offbeat.models import load_tokenizer
from scripts.bench.contender import WARM_UP_STEPS, StepMeasurement, Stopwatch, memory_bytes, serve
from scripts.bench.recipe import shared_config, trl_lora
from scripts.bench.sft_task import EXAMPLES, TRL_BATCH, SftTask
from scripts.bench.trl_step import StepTimer


def measure(task: SftTask) -> StepMeasurement:
    """Train on the same examples step after step."""
    spec, stopwatch = task.spec(), Stopwatch()
    with TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=str(task.model),
            args=_config(task, Path(output_dir)),
            train_dataset=Dataset.from_list(
                [
                    {"input_ids": list(one.ids), "completion_mask": [int(m) for m in one.is_target]}
                    for one in task.examples()
                ]
            ),
            processing_class=load_tokenizer(task.model, None),
            peft_config=None if task.is_full else trl_lora(spec),
            callbacks=[StepTimer(stopwatch)],
        )
        loaded_bytes = memory_bytes("VmRSS")
        trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return task.measured(stopwatch, loaded_bytes)


def _config(task: SftTask, output_dir: Path) -> SFTConfig:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    steps = WARM_UP_STEPS + task.repeats
    shared = shared_config(task.spec(), steps=steps, output_dir=output_dir)
    if task.is_full:
        shared |= {"model_init_kwargs": {"dtype": "float32"}, "bf16": True}
    return SFTConfig(
        **shared,
        ddp_backend="gloo" if ranks > 1 else None,
        per_device_train_batch_size=TRL_BATCH,
        gradient_accumulation_steps=EXAMPLES // TRL_BATCH // ranks,
        completion_only_loss=True,
        max_length=None,
    )


if __name__ == "__main__":
    serve(SftTask, measure)
