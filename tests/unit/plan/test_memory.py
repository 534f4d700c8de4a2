"""Hand-worked bytes of a model small enough to count."""

from dataclasses import replace

import pytest

from offbeat.contracts.plan import GatheredUnit, Method
from offbeat.plan.activations import backward_bytes, block_bytes, checkpoint_bytes
from offbeat.plan.architecture import Architecture
from offbeat.plan.known_models import KNOWN
from offbeat.plan.memory import (
    HEAD_POSITIONS,
    STATE_FILE_BYTES,
    Phase,
    held_bytes,
    host_bytes,
    largest_unit,
    logits_bytes,
    moments,
    peak,
)
from offbeat.plan.setup import OFFBEAT, Recipe
from tests.unit.plan.programs import ALL_LINEAR, setup

MODEL = Architecture(
    name="hand",
    hidden=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp=128,
    vocabulary=1000,
    is_tied=False,
)
LINEAR = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
TOTAL = LINEAR + 4 * 2 * 64 + 2 * 64_000 + 64
TRAINED = 8 * 4 * (128 + 96 + 96 + 128 + 3 * 192)
BARE = replace(OFFBEAT, slack=0.0, context_bytes=0)


def test_a_block_keeps_22h_6kv_8f_bytes_a_token_in_bfloat16() -> None:
    at = setup("lora", 100, is_checkpointed=False, rank=8)
    assert block_bytes(MODEL, at, BARE) == 100 * (22 * 64 + 6 * 32 + 8 * 128)
    wide = replace(at, dtype_bytes=4)
    assert block_bytes(MODEL, wide, BARE) == 100 * 2 * (14 * 64 + 6 * 32 + 8 * 128)


def test_inputs_of_frozen_projections_are_not_kept() -> None:
    at = setup("lora", 100, is_checkpointed=False, targets=frozenset({"q_proj"}))
    assert block_bytes(MODEL, at, BARE) == 100 * (22 * 64 + 6 * 32 + 8 * 128 - 2 * 64 - 2 * 128)


def test_dropout_keeps_a_mask_and_what_it_leaves_for_every_adapter() -> None:
    at = setup("lora", 100, is_checkpointed=False, has_dropout=True)
    without = block_bytes(MODEL, replace(at, has_dropout=False), BARE)
    assert block_bytes(MODEL, at, BARE) - without == 100 * 3 * (6 * 64 + 128)


def test_attention_weights_are_kept_where_the_attention_is_no_kernel() -> None:
    at = setup("lora", 100, is_checkpointed=False, visible_pairs=5000)
    fused = replace(at, visible_pairs=0)
    assert block_bytes(MODEL, at, BARE) - block_bytes(MODEL, fused, BARE) == 5000 * 4 * 2
    # Gradients of an MLP that is wider than attention's weights, then of heavier weights.
    assert backward_bytes(MODEL, fused, BARE) == 100 * (8 * 128 + 4 * 64)
    heavy = replace(at, visible_pairs=100_000)
    assert backward_bytes(MODEL, heavy, BARE) == 3 * 100_000 * 4 * 2 - 100 * 8 * 128


def test_checkpointing_keeps_the_inputs_of_the_blocks() -> None:
    at = setup("lora", 100, is_checkpointed=True)
    assert checkpoint_bytes(MODEL, at) == 4 * 2 * 64 * 100


@pytest.mark.parametrize(
    ("method", "frozen", "weights", "trained"),
    [
        ("lora", 2 * TOTAL, 6 * TRAINED, TRAINED),
        ("qlora", LINEAR * 0.5 + 2 * (TOTAL - LINEAR), 6 * TRAINED, TRAINED),
        ("full", 0, 4 * TOTAL, TOTAL),
    ],
)
@pytest.mark.parametrize("keeps_adapter", [True, False])
def test_what_is_held_from_step_to_step_is_shared_among_the_ranks_but_offbeat_s_adapter(
    method: Method, frozen: float, weights: float, trained: int, keeps_adapter: bool
) -> None:
    at = setup(method, 100, is_checkpointed=True, rank=8, num_shards=2)
    own = held_bytes(MODEL, at, replace(BARE, keeps_adapter=keeps_adapter))
    sharers = 1 if keeps_adapter and method != "full" else 2
    assert own.frozen == frozen / 2
    assert own.weights == weights / sharers
    assert own.gradients == 4 * trained / sharers
    assert own.moments == 8 * trained / sharers
    # The constants of a quantisation are every rank's.
    assert own.quant_state == (LINEAR * (1 / 64 + 1 / 4096) if method == "qlora" else 0)


def test_the_head_works_on_a_few_positions_at_a_time() -> None:
    at = setup("lora", 100, is_checkpointed=True)
    buffers = 64 * 1000 * (4 + 4 + 2)
    assert logits_bytes(MODEL, at, BARE) == buffers + 2 * 100 * 64 * 2
    assert logits_bytes(MODEL, at, Recipe(head="naive")) == 15.5 * 100 * 1000


def test_the_head_positions_are_the_trainers() -> None:
    from offbeat.algorithms.logprobs import CHUNK_POSITIONS

    assert HEAD_POSITIONS == CHUNK_POSITIONS


def test_the_files_of_a_state_are_as_large_as_the_trainer_makes_them() -> None:
    from services.trainer.sharded_state import PART_BYTES

    assert STATE_FILE_BYTES == PART_BYTES


def test_each_moment_has_its_own_kinds() -> None:
    at = setup("lora", 100, is_checkpointed=False, rank=8)
    head, backward, end, update = moments(MODEL, at, BARE)
    block = 100 * (22 * 64 + 6 * 32 + 8 * 128)
    assert (head.activations, head.gathered) == (4 * block, 0)
    assert backward.activations == 4 * block + 100 * (8 * 128 + 4 * 64)
    assert end.activations == block + 100 * (8 * 128 + 4 * 64)
    assert (backward.logits, update.logits, update.activations) == (0, 0, 0)
    assert update.optimizer == (8 + 16) * TRAINED
    assert head.total == 2 * TOTAL + (6 + 4 + 8) * TRAINED + 4 * block + head.logits


def test_gradients_come_with_the_backward_where_nothing_is_accumulated() -> None:
    at = setup("lora", 100, is_checkpointed=True, rank=8)
    once = moments(MODEL, at, replace(BARE, keeps_gradients=False))
    assert [moment.gradients for moment in once] == [0, 0, 4 * TRAINED, 4 * TRAINED]
    again = moments(MODEL, at, BARE)
    assert [moment.gradients for moment in again] == [4 * TRAINED] * 4


def test_sharding_gathers_two_blocks_and_a_table() -> None:
    at = setup("lora", 100, is_checkpointed=True, rank=8, num_shards=2)
    head, backward, *_ = moments(MODEL, at, BARE)
    a_block = LINEAR // 4 + 2 * 64
    # Offbeat's head is whole from the beginning.
    assert (head.gathered, backward.gathered) == (2 * 64_000, 2 * 64_000 + 2 * 2 * a_block)
    freed = moments(MODEL, at, replace(BARE, keeps_head=False))[1]
    assert freed.gathered == 2 * 2 * a_block
    full = replace(at, method="full", targets=frozenset())
    head, backward, *_ = moments(MODEL, full, BARE)
    # Embedding and head are one unit; the head's gradient is there before the backward.
    assert head.gathered == 2 * 3 * 64_000
    assert backward.gathered == 2 * 2 * 64_000 + (2 * 2 + 2 + 4) * a_block


def test_t22_the_largest_unit_is_named() -> None:
    alone = setup("lora", 100, is_checkpointed=True, rank=8)
    assert largest_unit(MODEL, alone, BARE) is None
    shared = replace(alone, num_shards=2)
    a_block = 2 * (LINEAR // 4 + 2 * 64)
    table = GatheredUnit(name="the embedding", size_bytes=2 * 64_000)
    assert largest_unit(MODEL, shared, BARE) == table
    full = replace(shared, method="full", targets=frozenset())
    assert largest_unit(MODEL, full, BARE) == GatheredUnit(
        name="embedding and head", size_bytes=2 * 2 * 64_000
    )
    wide = replace(MODEL, vocabulary=10)
    assert largest_unit(wide, shared, BARE) == GatheredUnit(name="a block", size_bytes=a_block)


def test_offload_leaves_only_what_is_computed_with_on_the_gpu() -> None:
    at = setup("qlora", 100, is_checkpointed=True, rank=8, num_shards=2, is_offloaded=True)
    all_of_it = replace(BARE, keeps_adapter=False)
    for moment in moments(MODEL, at, all_of_it):
        assert moment.parameters == LINEAR * (1 / 64 + 1 / 4096)
        assert (moment.gradients, moment.optimizer) == (0, 0)
    own = held_bytes(MODEL, at, all_of_it)
    on_host = host_bytes(MODEL, at, all_of_it, publishes=False)
    moved = own.frozen + own.weights + own.gradients + own.moments + own.update
    assert on_host == 2e9 + moved
    assert host_bytes(MODEL, at, all_of_it, publishes=True) == on_host + 8 * TRAINED


def test_offbeat_offloads_the_base_model_and_not_the_adapter() -> None:
    at = setup("lora", 100, is_checkpointed=True, rank=8, num_shards=2, is_offloaded=True)
    *_, update = moments(MODEL, at, BARE)
    assert (update.parameters, update.gradients) == (6 * TRAINED, 4 * TRAINED)
    assert update.optimizer == (8 + 16) * TRAINED
    assert host_bytes(MODEL, at, BARE, publishes=False) == 2e9 + 2 * TOTAL / 2


def test_overhead_is_a_share_of_all_kinds_and_the_context() -> None:
    at = setup("lora", 100, is_checkpointed=True)
    bare, real = peak(MODEL, at, BARE), peak(MODEL, at, OFFBEAT)
    assert real.overhead == pytest.approx(bare.total * 0.08 + 1.5e9)


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"token_budget": 8192, "is_checkpointed": False}, "backward"),
        ({"token_budget": 64, "rank": 256}, "update"),
    ],
)
def test_the_peak_is_the_moment_that_takes_most(changes: dict[str, int], phase: Phase) -> None:
    at = setup("lora", 256, is_checkpointed=True, targets=ALL_LINEAR)
    at = replace(at, **changes)  # pyright: ignore[reportArgumentType]
    assert peak(KNOWN["smollm2-135m"], at, BARE).phase == phase
