"""Training all weights of the tiny model: ours, and a plain loop to compare it with."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Manifest
from offbeat.objects import S3ObjectStore
from services.trainer.full_model import FullModel
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from tests.ranks import CPU, ragged_examples
from tests.specs import sft_spec_dict

RATE, DECAY, NORM_MAX = 1e-2, 0.1, 0.5


def spec_of(model: Path, dtype: str = "float32", **changes: Any) -> RunSpec:
    raw = sft_spec_dict(model={"id": str(model), "dtype": dtype}, **changes)
    del raw["lora"]
    return RunSpec.model_validate(raw)


def step(full: FullModel, run: RunSpec) -> tuple[float, float]:
    """The loss and the norm of the gradient of one step over all examples."""
    batches = example_batches(ragged_examples(), run.train, CPU)
    gradient, _ = sft_gradient(full, batches, run.train, version=1, between=lambda _: None)
    return gradient.loss, full.update(RATE, DECAY, NORM_MAX)


class Plain:
    """One float32 model, one example at a time, and torch's own optimizer."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        )
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [one for one in weights if one.ndim > 1], "weight_decay": DECAY},
                {"params": [one for one in weights if one.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=RATE,
        )

    def step(self) -> tuple[float, float]:
        self.optimizer.zero_grad()
        examples = ragged_examples()
        num_targets = sum(sum(example.is_target) for example in examples)
        total = torch.zeros(())
        for example in examples:
            ids = torch.tensor([example.ids])
            logits = self.model(input_ids=ids).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        loss = total / num_targets
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), NORM_MAX)
        self.optimizer.step()
        return loss.item(), norm.item()


def whole(full: FullModel, store: S3ObjectStore, folder: Path) -> dict[str, Tensor]:
    """The model's weights as the folder has them that it writes."""
    return dict(written(full, store, folder).named_parameters())


def written(full: FullModel, store: S3ObjectStore, folder: Path) -> PreTrainedModel:
    """The model as `from_pretrained` loads what was written."""
    prefix = f"folders/{uuid4().hex}/"
    folder.mkdir()
    for file in full.write_folder(prefix):
        store.download(prefix + file.name, folder / file.name)
        assert (folder / file.name).stat().st_size == file.size_bytes
    return AutoModelForCausalLM.from_pretrained(folder)


def saved(full: FullModel, store: S3ObjectStore) -> Manifest:
    """A version with the model's state."""
    prefix = f"runs/run-{uuid4().hex}/versions/000001-job-1/"
    files = full.save(prefix)()
    for file in files:
        assert store.size_bytes(prefix + file.name) == file.size_bytes
    return Manifest(
        run_id="run",
        version=1,
        parent=0,
        job_id="job",
        attempt=1,
        prefix=prefix,
        files=files,
        base_model="tiny",
        base_revision=None,
    )
