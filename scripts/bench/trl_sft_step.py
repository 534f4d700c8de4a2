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
from scripts.bench.recipe import trl_lora
from scripts.bench.sft_task import EXAMPLES, TRL_BATCH, SftTask
from scripts.bench.trl_step import StepTimer


def measure(task: SftTask) -> StepMeasurement:
    """Train on the same examples step after step."""
    spec, examples, stopwatch = task.spec(), task.examples(), Stopwatch()
    with TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=str(task.model),
            args=_config(task, Path(output_dir)),
            train_dataset=Dataset.from_list(
                [
                    {"input_ids": list(one.ids), "completion_mask": [int(m) for m in one.is_target]}
                    for one in examples
                ]
            ),
            processing_class=load_tokenizer(task.model, None),
            peft_config=trl_lora(spec),
            callbacks=[StepTimer(stopwatch)],
        )
        loaded_bytes = memory_bytes("VmRSS")
        trainer.train()
    if dist.is_initialized():
        dist.destroy_process_group()
    return StepMeasurement(
        seconds=stopwatch.seconds,
        cpu_seconds=stopwatch.cpu_seconds,
        loaded_bytes=loaded_bytes,
        peak_bytes=memory_bytes("VmHWM"),
        forwarded_tokens=sum(len(example.ids) for example in examples),
        scored_tokens=sum(sum(example.is_target) for example in examples),
    )


def _config(task: SftTask, output_dir: Path) -> SFTConfig:
    train = task.spec().train
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return SFTConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        ddp_backend="gloo" if ranks > 1 else None,
        model_init_kwargs={"dtype": task.spec().model.dtype},
        per_device_train_batch_size=TRL_BATCH,
        gradient_accumulation_steps=EXAMPLES // TRL_BATCH // ranks,
        gradient_checkpointing=False,
        completion_only_loss=True,
        max_length=None,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler,
        max_grad_norm=train.max_grad_norm,
        weight_decay=train.weight_decay,
        max_steps=WARM_UP_STEPS + task.repeats,
        seed=train.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    serve(SftTask, measure)
