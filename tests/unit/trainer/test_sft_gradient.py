"""A supervised step's loss and gradient: by an independent float64 computation, whatever the
packing, and against TRL's own trainer on the same tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from offbeat.algorithms.example_packing import Example
from offbeat.contracts.run_spec import LoraSection, ModelSection, TrainSection
from services.trainer.faithful import packing_error
from services.trainer.initial import seeded_adapter
from services.trainer.metrics import Metrics
from services.trainer.policy import Policy
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient, validation

IDS = ((5, 6, 7, 20, 21), (9, 30), (40, 41, 42, 43, 44, 45, 46, 47), (50, 51, 52), (60, 61, 62, 63))
TARGETS = ((3, 4), (1,), (2, 3, 6), (1, 2), (3,))
EXAMPLES = [
    Example(ids=ids, is_target=tuple(at in targets for at in range(len(ids))))
    for ids, targets in zip(IDS, TARGETS, strict=True)
]
NUM_TARGETS = 9
BUDGETS = (64, 8, 3)
"""All in one row; four rows in as many batches; every example by itself."""


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Policy:
    """With factors that are not zero."""
    model = ModelSection(id="tiny", dtype="float32")
    policy = Policy.load(tiny_model, model, LoraSection(rank=2), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    adapter = seeded_adapter(policy.shapes, 1)
    policy.install(
        {
            name: one + 0.1 * torch.randn(one.shape, generator=generator)
            for name, one in adapter.items()
        }
    )
    return policy


def gradient_of(policy: Policy, **train: Any) -> tuple[float, dict[str, Tensor], Metrics]:
    section = TrainSection(steps=1, **train)
    batches = example_batches(EXAMPLES, section, policy.device)
    gradient, seen = sft_gradient(policy, batches, section, version=1, between=lambda _: None)
    return gradient.loss, gradient.gradients, seen


def plain(policy: Policy) -> tuple[float, dict[str, Tensor], int]:
    """One example at a time, full logits, float64; and how many targets are the likeliest token."""
    model = policy._adapted.double()  # pyright: ignore[reportPrivateUsage]
    attention = policy._base.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    policy._base.set_attn_implementation("eager")  # pyright: ignore[reportPrivateUsage]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    num_best = 0
    for ids, targets in zip(IDS, TARGETS, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
        for at in targets:
            total = total - logits[at - 1].log_softmax(-1)[ids[at]] / NUM_TARGETS
            num_best += int(logits[at - 1].argmax()) == ids[at]
    total.backward()
    gradients = {
        name: copy.grad.clone() for name, copy in policy.copies.items() if copy.grad is not None
    }
    model.zero_grad()
    model.float()
    policy._base.set_attn_implementation(attention)  # pyright: ignore[reportPrivateUsage, reportArgumentType]
    return total.item(), gradients, num_best


@pytest.mark.parametrize("token_budget", [64, "auto"])
def test_the_loss_is_the_masked_cross_entropy_in_float64(
    policy: Policy, token_budget: int | str
) -> None:
    """Divided by the targets of the whole step."""
    expected, expected_gradients, num_best = plain(policy)
    loss, gradients, seen = gradient_of(policy, token_budget=token_budget)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert seen["mean_token_accuracy"] == pytest.approx(num_best / NUM_TARGETS)
    assert len(expected_gradients) == len(gradients) == 2 * 7 * 2
    for name, gradient in gradients.items():
        wanted = expected_gradients[name].float()
        assert torch.allclose(gradient, wanted, atol=1e-6, rtol=1e-4), name


def test_packing_and_accumulation_do_not_change_the_gradient(policy: Policy) -> None:
    """Invariant 6, with recomputed activations too."""
    section = TrainSection(steps=1)
    made = []
    for budget in BUDGETS:
        # Below the least budget that a spec may have, so that few tokens make several batches.
        small = section.model_copy(update={"token_budget": budget})
        batches = example_batches(EXAMPLES, small, policy.device)
        gradient, _ = sft_gradient(policy, batches, section, version=1, between=lambda _: None)
        made.append((len(batches), gradient))
    assert [number for number, _ in made] == [1, 4, 5]
    loss, recomputed, _ = gradient_of(policy, gradient_checkpointing=True)
    whole = made[0][1]
    assert loss == pytest.approx(whole.loss, abs=1e-6)
    for name, wanted in whole.gradients.items():
        for gradients in (made[1][1].gradients, made[2][1].gradients, recomputed):
            assert torch.allclose(gradients[name], wanted, atol=1e-6, rtol=1e-4), name


def test_t23_examples_of_a_row_are_computed_as_if_alone(policy: Policy) -> None:
    """The check that every model passes before it is trained on such rows."""
    [batch] = example_batches(EXAMPLES, TrainSection(steps=1), policy.device)
    assert batch.ids_BT.shape == (1, 22)
    assert packing_error(policy, batch) < 1e-5


def test_validation_is_the_same_loss_without_a_gradient(policy: Policy) -> None:
    section = TrainSection(steps=1)
    loss, _, seen = gradient_of(policy)
    batches = example_batches(EXAMPLES, section, policy.device)
    metrics = validation(policy, batches, lambda: None)
    expected = {"eval_loss": loss, **{f"eval_{name}": value for name, value in seen.items()}}
    assert metrics == pytest.approx(expected, abs=1e-5)
    assert set(metrics) == {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"}
    assert all(copy.grad is None for copy in policy.copies.values())


def test_trl_computes_the_same_loss_and_metrics(tiny_model: Path, tmp_path: Path) -> None:
    """On the base model: version 0 of a run, whose factors B are zero."""
    trainer = SFTTrainer(
        LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            completion_only_loss=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(EXAMPLES),
        ),
        train_dataset=Dataset.from_list(
            [
                {"input_ids": list(one.ids), "completion_mask": [int(m) for m in one.is_target]}
                for one in EXAMPLES
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    model = trainer.model
    assert model is not None
    theirs = trainer.compute_loss(model.train(), inputs)
    model_section = ModelSection(id="tiny", dtype="float32")
    ours = Policy.load(tiny_model, model_section, LoraSection(rank=2), torch.device("cpu"))
    ours.install(seeded_adapter(ours.shapes, 0))
    loss, _, seen = gradient_of(ours)
    assert isinstance(theirs, Tensor)
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    for name in ("entropy", "mean_token_accuracy"):
        [value] = trainer._metrics["train"][name]  # pyright: ignore[reportPrivateUsage]
        assert seen[name] == pytest.approx(value, abs=1e-5)
