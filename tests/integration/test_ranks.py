"""A model that several ranks hold together computes what one process computes, and publishes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat.contracts.run_spec import RunSpec
from offbeat.errors import LeaseLostError, PermanentJobError
from services.trainer.batch import StepBatch
from services.trainer.faithful import smallest_batch
from services.trainer.gradient import Gradient, micro_batches, step_gradient
from services.trainer.initial import seeded_adapter
from services.trainer.memory import Memory
from services.trainer.metrics import Metrics
from services.trainer.optimizer import next_state
from services.trainer.policy import Policy
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient, validation
from services.trainer.state import TrainerState, starting_state
from tests.ranks import (
    CPU,
    LAYOUTS,
    MICRO_BATCHES,
    Layout,
    alone,
    assert_same,
    ragged_examples,
    running_ranks,
)
from tests.specs import spec
from tests.tiny_model import write_tiny_model
from tests.unit.trainer.rollouts import rollout

STEPS = 10


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def ranked(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    log = tmp_path_factory.mktemp("ranks") / "followers.log"
    with running_ranks(
        log, layout.size, shard_ranks=layout.shard_ranks, offload=layout.offload
    ) as memory:
        yield memory


@pytest.fixture(scope="module")
def model(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, tie_word_embeddings=layout.is_tied)


def spec_of(model: Path, dtype: str = "float32", **changes: Any) -> RunSpec:
    return spec(model={"id": str(model), "dtype": dtype}, **changes)


def state_of(policy: Policy) -> TrainerState:
    """Factors of which none is zero, so that every tensor has a gradient."""
    generator = torch.Generator().manual_seed(5)
    adapter = seeded_adapter(policy.shapes, 1)
    return starting_state(
        {
            name: one + 0.1 * torch.randn(one.shape, generator=generator)
            for name, one in adapter.items()
        }
    )


def ragged_batch(run: RunSpec) -> StepBatch:
    """Groups of two and three; completions of 1 to 60 tokens; one group without a signal."""
    lengths = ((1, 60), (30, 12, 45), (20, 50))
    rewards = ((1.0, 0.0), (0.0, 0.5, 1.0), (1.0, 1.0))
    groups = [
        tuple(
            rollout(
                number,
                reward=reward,
                version=0,
                ids=tuple(range(20 + number, 20 + number + length)),
            )
            for number, (length, reward) in enumerate(zip(*group, strict=True))
        )
        for group in zip(lengths, rewards, strict=True)
    ]
    return StepBatch.of_groups(groups, run)


def grpo_gradient(policy: Policy, run: RunSpec, state: TrainerState) -> Gradient:
    policy.install(state.masters)
    batch = ragged_batch(run)
    gradient, tokens = step_gradient(
        policy,
        micro_batches(batch, run, CPU),
        batch,
        run,
        version=1,
        between=lambda _: None,
    )
    assert tokens is not None
    return gradient


@pytest.mark.parametrize(
    ("budget", "checkpointing"), MICRO_BATCHES.values(), ids=MICRO_BATCHES.keys()
)
def test_t12_t13_t14_t16_the_gradient_is_that_of_one_process_whatever_the_ranks_get(
    ranked: Memory, model: Path, budget: int, checkpointing: bool
) -> None:
    run = spec_of(
        model,
        train={"token_budget": budget, "gradient_checkpointing": checkpointing, "beta": 0.1},
    )
    one = alone(run)
    state = state_of(one)
    ours = grpo_gradient(ranked.policy(run), run, state)
    assert_same(ours, grpo_gradient(one, run, state), 1e-6, 1e-4)


def test_t3_t5_a_bfloat16_base_has_a_float32_adapter_on_any_ranks(
    ranked: Memory, model: Path
) -> None:
    run = spec_of(model, "bfloat16", train={"token_budget": 64})
    one = alone(run)
    state = state_of(one)
    expected = grpo_gradient(one, run, state)
    ours = grpo_gradient(ranked.policy(run), run, state)
    norm, difference = (
        torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradients in (
            expected.gradients.values(),
            [ours.gradients[name] - one for name, one in expected.gradients.items()],
        )
    )
    assert {gradient.dtype for gradient in ours.gradients.values()} == {torch.float32}
    # The same products in the same type; a micro-batch on another rank is rounded apart.
    assert difference < 1e-2 * norm
    state, metrics = next_state(state, ours, run.train, 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-2)
    assert {master.dtype for master in state.masters.values()} == {torch.float32}


def test_t8_t10_t15_every_rank_reads_the_base_model_as_it_is(ranked: Memory, model: Path) -> None:
    run = spec_of(model)
    one = alone(run)
    ours, batch = ranked.policy(run), smallest_batch()
    for policy in (one, ours):
        policy.install(state_of(one).masters)
    torch.testing.assert_close(
        ours.distributions(batch), one.distributions(batch), atol=1e-6, rtol=0
    )
    assert (ours.eos_token_ids, ours.shapes) == (one.eos_token_ids, one.shapes)


def test_a_rank_holds_its_part_of_each_block_and_the_head_whole(
    ranked: Memory, model: Path
) -> None:
    policy = ranked.policy(spec_of(model))
    base = policy._base  # pyright: ignore[reportPrivateUsage]
    num_ranks, num_shards = ranked.ranks.size, ranked.ranks.num_shards
    parts = {
        name: weight.to_local().shape[0] == -(-weight.shape[0] // num_shards)
        for name, weight in base.named_parameters()
        if isinstance(weight, DTensor)
    }
    if num_ranks > num_shards == 1:  # a copy on each
        assert parts == {}
        return
    assert set(parts.values()) == {True}
    whole = {name for name, weight in base.named_parameters() if not isinstance(weight, DTensor)}
    assert {name for name in whole if ".lora_" not in name} == {
        "model.embed_tokens.weight" if base.config.tie_word_embeddings else "lm_head.weight"
    }


def frozen(policy: Policy) -> dict[str, Tensor]:
    """This rank's part of the base model."""
    base = policy._base  # pyright: ignore[reportPrivateUsage]
    return {
        name: (weight.to_local() if isinstance(weight, DTensor) else weight).clone()
        for name, weight in base.named_parameters()
        if not weight.requires_grad
    }


def test_t1_t2_t11_t19_ten_steps_make_the_adapter_that_one_process_makes(
    ranked: Memory, model: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64, "steps": STEPS})
    policies = [alone(run), ranked.policy(run)]
    started, base = state_of(policies[0]), frozen(policies[1])
    ended: list[TrainerState] = []
    for policy in policies:
        state = started
        for step in range(STEPS):
            state, _ = next_state(state, grpo_gradient(policy, run, state), run.train, step)
        ended.append(state)
    assert ended[0].masters.keys() == ended[1].masters.keys()
    for name, master in ended[0].masters.items():
        assert not torch.equal(master, started.masters[name]), name
        torch.testing.assert_close(ended[1].masters[name], master, atol=1e-4, rtol=0)
    for name, weight in frozen(policies[1]).items():
        assert torch.equal(weight, base[name]), name


def test_a_supervised_step_and_its_validation_are_those_of_one_process(
    ranked: Memory, model: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64})

    def seen(policy: Policy) -> tuple[Gradient, Metrics, Metrics]:
        policy.install(state.masters)
        batches = example_batches(ragged_examples(), run.train, CPU)
        gradient, metrics = sft_gradient(
            policy, batches, run.train, version=1, between=lambda _: None
        )
        return gradient, metrics, validation(policy, batches, lambda: None)

    one = alone(run)
    state = state_of(one)
    expected, ours = seen(one), seen(ranked.policy(run))
    assert_same(ours[0], expected[0], 1e-6, 1e-4)
    for ours_metrics, metrics in zip(ours[1:], expected[1:], strict=True):
        assert ours_metrics == pytest.approx(metrics, abs=1e-6)


def test_a_job_that_is_taken_away_within_a_step_leaves_the_ranks_together(
    ranked: Memory, model: Path
) -> None:
    run = spec_of(model, train={"token_budget": 64, "beta": 0.1})
    one = alone(run)
    policy, batch, state = ranked.policy(run), ragged_batch(run), state_of(one)
    policy.install(state.masters)

    def between(done: float) -> None:
        if done > 0:
            raise LeaseLostError("taken")

    with pytest.raises(LeaseLostError, match="taken"):
        step_gradient(
            policy, micro_batches(batch, run, CPU), batch, run, version=1, between=between
        )
    assert_same(grpo_gradient(policy, run, state), grpo_gradient(one, run, state), 1e-6, 1e-4)


def test_a_model_that_no_rank_can_read_fails_the_job_and_not_the_ranks(
    ranked: Memory, model: Path, tmp_path: Path
) -> None:
    broken = write_tiny_model(tmp_path, tie_word_embeddings=True)
    (broken / "model.safetensors").unlink()
    with pytest.raises(PermanentJobError, match=r"be trained: (its files lack|Error no file)"):
        ranked.policy(spec_of(broken))
    run = spec_of(model)
    one = alone(run)
    state = state_of(one)
    ours = grpo_gradient(ranked.policy(run), run, state)
    assert_same(ours, grpo_gradient(one, run, state), 1e-6, 1e-4)


def test_dropout_is_each_rank_s_own_and_the_same_each_time(ranked: Memory, model: Path) -> None:
    run = spec_of(model, lora={"rank": 2, "alpha": 4, "dropout": 0.5})
    policy = ranked.policy(run)
    state = state_of(policy)
    first, second = (grpo_gradient(policy, run, state) for _ in range(2))
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name
