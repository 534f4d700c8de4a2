"""The programs behind the published measurements, as the formulas see them."""

from dataclasses import replace

from offbeat.plan.known_models import KNOWN
from offbeat.plan.setup import Method, Recipe, Setup

GIB = 2**30
ALL_LINEAR = frozenset(KNOWN["llama-2-7b"].linears)
QUERY_VALUE = frozenset({"q_proj", "v_proj"})
ALL_BUT_KEYS = ALL_LINEAR - {"k_proj"}
ALL_BUT_OUTPUT = ALL_LINEAR - {"o_proj"}

TORCHTUNE = Recipe(
    head="chunked",
    trained_bytes=2,
    copy_bytes=0,
    gradient_bytes=2,
    moment_bytes=4,
    update_bytes=0,
    reduce_bytes=2,
    keeps_gradients=False,
    is_compiled=True,
    slack=0.0,
    context_bytes=0,
)
"""bf16 throughout, compiled, one micro-batch a step; it reports what the allocator has handed out.
"""
TORCHTUNE_EAGER = replace(TORCHTUNE, head="naive", is_compiled=False)
TORCHTUNE_FSDP = replace(TORCHTUNE, gathers_tables_for_good=True, shards_quant_state=True)
"""torchao's NF4 tensors are sharded with their constants."""

HUGGING_FACE = Recipe(
    head="naive",
    copy_bytes=0,
    update_bytes=0,
    gathers_tables_for_good=True,
    adapter_input_bytes=4,
)
"""TRL's SFTTrainer with PEFT and FSDP1: float32 adapters, the memory of the whole process."""

ANSWER_AI = replace(HUGGING_FACE, adapter_input_bytes=0, slack=0.12, context_bytes=0)
"""fsdp_qlora's `train.py` reports reserved memory: by its own words 10.22 GiB for 9.16 allocated.
"""

PRIME_RL = Recipe(
    base_bytes=4, copy_bytes=0, update_bytes=0, gathers_tables_for_good=True, context_bytes=0
)
"""Weights in float32, log-probabilities by tiles; it reports reserved memory."""

TRACKER = Recipe(head="naive", copy_bytes=0, update_bytes=0, slack=0.0, context_bytes=0)
"""A dry run with fake tensors: nothing but tensors is counted."""


def setup(method: Method, token_budget: int, *, is_checkpointed: bool, **fields: object) -> Setup:
    """All projections adapted unless said otherwise."""
    default = Setup(
        method=method,
        token_budget=token_budget,
        is_checkpointed=is_checkpointed,
        targets=frozenset() if method == "full" else ALL_LINEAR,
    )
    return replace(default, **fields)  # pyright: ignore[reportArgumentType]
