"""A base model in 4 bits: the adapter is trained on it as it is held, whole or by several ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from torch.distributed.tensor import DTensor

from offbeat.contracts.run_spec import RunSpec
from offbeat.errors import PermanentJobError
from services.trainer.faithful import smallest_batch
from services.trainer.gradient import Gradient
from services.trainer.memory import Memory
from services.trainer.optimizer import next_state
from services.trainer.policy import Policy
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from services.trainer.state import TrainerState, starting_state
from tests.ranks import CPU, alone, assert_same, ragged_examples, running_ranks
from tests.specs import sft_spec
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, hidden_size=64, head_dim=16)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Memory]:
    log = tmp_path_factory.mktemp("ranks") / "followers.log"
    # One rank holds a model in parts when these are offloaded.
    with running_ranks(
        log, request.param, shard_ranks=request.param, offload=request.param == 1
    ) as memory:
        yield memory


def spec_of(model: Path, quantization: str = "nf4", **train: Any) -> RunSpec:
    section = {"id": str(model), "dtype": "float32", "quantization": quantization}
    return sft_spec(model=section, train={"token_budget": 64, **train})


def state_of(policy: Policy) -> TrainerState:
    generator = torch.Generator().manual_seed(5)
    return starting_state(
        {
            name: 0.1 * torch.randn(shape, generator=generator)
            for name, shape in policy.shapes.items()
        }
    )


def gradient_of(policy: Policy, run: RunSpec, state: TrainerState) -> Gradient:
    policy.install(state.masters)
    batches = example_batches(ragged_examples(), run.train, CPU)
    gradient, _ = sft_gradient(policy, batches, run.train, version=1, between=lambda _: None)
    return gradient


def layers_of(policy: Policy) -> dict[str, Linear4bit]:
    base = policy._base  # pyright: ignore[reportPrivateUsage]
    named = base.named_modules()
    return {name: module for name, module in named if isinstance(module, Linear4bit)}


def test_all_linear_layers_but_the_head_are_packed_in_the_model_s_own_type(model: Path) -> None:
    """T6: an eighth of a float32 each, and no whole weight is left."""
    policy, plain = alone(spec_of(model)), alone(spec_of(model, "none"))
    layers = layers_of(policy)
    assert len(layers) == 2 * 7
    base = plain._base  # pyright: ignore[reportPrivateUsage]
    for name, layer in layers.items():
        assert (layer.weight.dtype, layer.quant_storage) == (torch.float32, torch.float32)
        assert layer.weight.numel() == layer.in_features * layer.out_features // 8
        near = dequantize_4bit(layer.weight.data, layer.quant_state)
        weight = base.get_submodule(name).get_parameter("weight")
        assert 0 < (near - weight).abs().max() < 0.25 * weight.abs().max()


def test_layers_that_do_not_fill_blocks_are_refused(tiny_model: Path) -> None:
    """bitsandbytes would unpack them wrongly on a CPU, without a word."""
    with pytest.raises(PermanentJobError, match="32 inputs, and nf4 needs a multiple of 64"):
        alone(spec_of(tiny_model))


def test_the_adapter_learns_on_the_model_of_4_bits(model: Path) -> None:
    run = spec_of(model, steps=5, learning_rate=0.02)
    policy = alone(run)
    state, losses = state_of(policy), list[float]()
    for step in range(5):
        # bitsandbytes would pack its weights anew here, and have no gradient from then on.
        policy.distributions(smallest_batch())
        gradient = gradient_of(policy, run, state)
        assert all(one.abs().max() > 0 for one in gradient.gradients.values())
        state, metrics = next_state(state, gradient, run.train, step)
        losses.append(metrics["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1


def test_t6_t7_ranks_hold_the_same_model_of_4_bits(ranked: Memory, model: Path) -> None:
    run = spec_of(model)
    one, ours = alone(run), ranked.policy(run)
    state = state_of(one)
    for policy in (one, ours):
        policy.install(state.masters)
    batch = smallest_batch()
    ours_NV, expected_NV = ours.distributions(batch), one.distributions(batch)
    torch.testing.assert_close(ours_NV, expected_NV, atol=1e-5, rtol=0)
    plain = alone(spec_of(model, "none"))
    plain.install(state.masters)
    assert (plain.distributions(batch) - expected_NV).abs().max() > 1e-3
    for layer in layers_of(ours).values():
        assert isinstance(layer.weight, DTensor)
        assert layer.weight.dtype is ours.dtype
        assert layer.weight.to_local().numel() * ranked.ranks.size == layer.weight.numel()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_ranks_compute_the_gradient_of_one_process(
    ranked: Memory, model: Path, checkpointing: bool
) -> None:
    run = spec_of(model, gradient_checkpointing=checkpointing)
    one = alone(run)
    state = state_of(one)
    expected = gradient_of(one, run, state)
    ours = gradient_of(ranked.policy(run), run, state)
    assert_same(ours, expected, 1e-5, 1e-3)
