"""The formulas against the trainer itself: all tensors of a real step, counted."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.tensor import DTensor

from offbeat.algorithms.example_packing import Example
from offbeat.contracts.run_spec import RunSpec
from offbeat.objects import S3ObjectStore
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import BAND
from offbeat.plan.known_models import architecture_of
from offbeat.plan.memory import peak
from offbeat.plan.parameters import lora_targets
from offbeat.plan.setup import OFFBEAT, Setup
from services.trainer.batch import StepBatch
from services.trainer.gradient import micro_batches, step_gradient
from services.trainer.initial import seeded_adapter
from services.trainer.optimizer import next_state
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from services.trainer.state import starting_state
from tests.ranks import group_of_one, memory_of
from tests.specs import sft_spec_dict, spec
from tests.unit.plan.live_tensors import LiveTensors
from tests.unit.trainer.rollouts import rollout

NUM_PROMPT, GROUP_SIZE = 2, 8


def group_spec(dtype: Literal["bfloat16", "float32"], length: int, *, ac: bool) -> RunSpec:
    return spec(
        model={"id": "tiny", "dtype": dtype},
        lora={"rank": 4, "alpha": 4},
        rollout={"group_size": GROUP_SIZE, "groups_per_step": 1, "max_new_tokens": length},
        train={
            "steps": 2,
            "gradient_checkpointing": ac,
            "token_budget": NUM_PROMPT + GROUP_SIZE * length,
        },
    )


def step_peak_bytes(model: Path, run: RunSpec, length: int) -> int:
    """Take a step on one group of equally long completions."""
    policy = Policy.load(model, run.model, run.adapter, torch.device("cpu"))
    state = starting_state(seeded_adapter(policy.shapes, 0))
    policy.install(state.masters)
    samples = [
        rollout(sample, reward=sample % 2, version=0, ids=tuple(range(7, 7 + length)))
        for sample in range(GROUP_SIZE)
    ]
    batch = StepBatch.of_groups([tuple(samples)], run)
    rows = micro_batches(batch, run, policy.device)
    assert [row.ids_BT.numel() for row in rows] == [NUM_PROMPT + GROUP_SIZE * length]
    for row in rows:
        policy.check_packing(row)
    held = (*policy._adapted.parameters(), *policy._adapted.buffers())
    states = (state.masters, state.exp_avg, state.exp_avg_sq)
    alive = [*held, *(tensor for part in states for tensor in part.values())]
    with LiveTensors(tensor.data for tensor in alive) as live:
        gradient, _ = step_gradient(policy, rows, batch, run, version=1, between=lambda _: None)
        next_state(state, gradient, run.train, 0)
    return live.peak_bytes


def estimate_bytes(model: Architecture, run: RunSpec, length: int, *, ac: bool) -> float:
    """On a CPU attention is no kernel: the weights of every pair that sees one another are kept."""
    pairs = NUM_PROMPT**2 + GROUP_SIZE * length * (NUM_PROMPT + length)
    size = {"bfloat16": 2, "float32": 4}[run.model.dtype]
    setup = Setup(
        method="lora",
        token_budget=NUM_PROMPT + GROUP_SIZE * length,
        is_checkpointed=ac,
        rank=4,
        targets=lora_targets(model, "all-linear"),
        dtype_bytes=size,
        visible_pairs=pairs,
    )
    recipe = replace(OFFBEAT, copy_bytes=size, slack=0.0, context_bytes=0)
    return peak(model, setup, recipe).total


@pytest.mark.parametrize("ac", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [30, 60])
def test_a_real_step_takes_what_the_formula_says(
    tiny_model: Path, dtype: Literal["bfloat16", "float32"], length: int, ac: bool
) -> None:
    run = group_spec(dtype, length, ac=ac)
    counted = step_peak_bytes(tiny_model, run, length)
    formula = estimate_bytes(architecture_of(str(tiny_model)), run, length, ac=ac)
    assert formula == pytest.approx(counted, rel=BAND)


def full_spec(dtype: Literal["bfloat16", "float32"], length: int, *, ac: bool) -> RunSpec:
    raw = sft_spec_dict(
        model={"id": "tiny", "dtype": dtype},
        train={"gradient_checkpointing": ac, "token_budget": GROUP_SIZE * length},
    )
    del raw["lora"]
    return RunSpec.model_validate(raw)


def full_step_peak_bytes(model: Path, run: RunSpec, store: S3ObjectStore, length: int) -> int:
    """Take a step on two rows of equally long examples: the second one meets the gradients of the
    first."""
    full = memory_of(Ranks(), store=store).full_model(
        run.model_copy(update={"model": run.model.model_copy(update={"id": str(model)})})
    )
    ids = tuple(range(7, 7 + length))
    example = Example(ids=ids, is_target=(False, *(True,) * (length - 1)))
    rows = example_batches([example] * (2 * GROUP_SIZE), run.train, full.device)
    assert [row.ids_BT.numel() for row in rows] == [GROUP_SIZE * length] * 2
    for row in rows:
        full.check_packing(row)
    parts = full._state().values()
    with LiveTensors(part.to_local() for part in parts if isinstance(part, DTensor)) as live:
        sft_gradient(full, rows, run.train, version=1, between=lambda _: None)
        full.update(1e-3, 0.0, 1.0)
    return live.peak_bytes


@pytest.mark.parametrize("ac", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [30, 60])
def test_a_real_step_of_full_fine_tuning_takes_what_the_formula_says(
    tiny_model: Path,
    store: S3ObjectStore,
    dtype: Literal["bfloat16", "float32"],
    length: int,
    ac: bool,
) -> None:
    run = full_spec(dtype, length, ac=ac)
    with group_of_one():
        counted = full_step_peak_bytes(tiny_model, run, store, length)
    setup = Setup(
        method="full",
        token_budget=GROUP_SIZE * length,
        is_checkpointed=ac,
        dtype_bytes={"bfloat16": 2, "float32": 4}[dtype],
        visible_pairs=GROUP_SIZE * length**2,
    )
    recipe = replace(OFFBEAT, slack=0.0, context_bytes=0)
    formula = peak(architecture_of(str(tiny_model)), setup, recipe)
    assert formula.total == pytest.approx(counted, rel=BAND)
