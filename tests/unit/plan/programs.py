"""The programs behind the published measurements, as the formulas see them, and torchtune's
measurements, which the tests of memory and of speed share."""

from dataclasses import dataclass, replace

from offbeat.plan.known_models import KNOWN
from offbeat.plan.setup import Method, Recipe, Setup

GIB = 2**30
GB_IN_GIB = 1e9 / GIB
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
IN_BACKWARD = replace(TORCHTUNE, updates_in_backward=True)
OFFLOADED = replace(IN_BACKWARD, offloads_activations=True)
ADAPTER = replace(TORCHTUNE, offloads_activations=True)
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


def on_two_3090s(method: str, token_budget: int, *, is_offloaded: bool = False) -> Setup:
    """As fsdp_qlora's benchmarks have it."""
    return setup(
        "qlora" if method == "QLoRA" else "lora",
        token_budget,
        is_checkpointed=True,
        num_shards=2,
        rank=64,
        targets=ALL_BUT_OUTPUT,
        has_dropout=True,
        is_offloaded=is_offloaded,
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement of a GPU's peak."""

    name: str
    model: str
    setup: Setup
    recipe: Recipe
    gib: float


def point(name: str, model: str, setup: Setup, recipe: Recipe, gib: float) -> Point:
    """A point in one line."""
    return Point(name=name, model=model, setup=setup, recipe=recipe, gib=gib)


# Batches of 2 packed sequences of 2,048 tokens, compiled; AC where the configuration has it on and
# the card asks for it. The 405B configuration has a batch of 1.
TORCHTUNE_POINTS = (
    point(
        "[tune] 8B full, 8-bit paged AdamW in the backward, A6000",
        "llama-3.1-8b",
        setup("full", 4096, is_checkpointed=False),
        replace(TORCHTUNE, updates_in_backward=True, moments_are_paged=True),
        37.4,
    ),
    point(
        "[tune] 8B LoRA, A6000",
        "llama-3.1-8b",
        setup("lora", 4096, is_checkpointed=False, rank=8, targets=QUERY_VALUE),
        TORCHTUNE,
        30.3,
    ),
    point(
        "[tune] 8B QLoRA, 4090",
        "llama-3.1-8b",
        setup("qlora", 4096, is_checkpointed=True, rank=8, targets=QUERY_VALUE),
        TORCHTUNE,
        7.4,
    ),
    point(
        "[tune] 70B LoRA, 8 A100",
        "llama-3.1-70b",
        setup("lora", 4096, is_checkpointed=True, num_shards=8, targets=ALL_BUT_KEYS),
        TORCHTUNE_FSDP,
        27.6,
    ),
    point(
        "[tune] 70B full with offload, tables sharded on their own, 8 A100",
        "llama-3.1-70b",
        setup("full", 4096, is_checkpointed=True, num_shards=8, is_offloaded=True),
        TORCHTUNE,
        13.9,
    ),
    point(
        "[tune] 405B QLoRA, 8 A100",
        "llama-3.1-405b",
        setup("qlora", 2048, is_checkpointed=True, num_shards=8, targets=ALL_BUT_KEYS),
        TORCHTUNE_FSDP,
        44.8 * GB_IN_GIB,
    ),
)
