"""The formulas against published measurements of memory: each within 15 %.

Sources: [tune] torchtune's README, "Memory and training speed" and "Optimization flags" (Sept and
Dec 2024); [peft] PEFT's documentation, FSDP; [answer] AnswerDotAI/fsdp_qlora,
`benchmarks_03_2024.md`; [prime] prime-rl's benchmarks of 2026-02; [bnb] bitsandbytes#790;
[fake] FakeTensorMode with FSDPMemTracker, torch 2.13, Qwen2.5-7B.
"""

from dataclasses import replace

import pytest

from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import BAND
from offbeat.plan.known_models import KNOWN
from offbeat.plan.memory import held_bytes, peak
from offbeat.plan.setup import Recipe
from tests.unit.plan.programs import (
    ADAPTER,
    ANSWER_AI,
    GB_IN_GIB,
    GIB,
    HUGGING_FACE,
    IN_BACKWARD,
    OFFLOADED,
    PRIME_RL,
    TORCHTUNE,
    TORCHTUNE_EAGER,
    TORCHTUNE_POINTS,
    TRACKER,
    Point,
    on_two_3090s,
    point,
    setup,
)

# 2 sequences of 4,096 tokens, one lever after the other; LoRA and QLoRA without the last two.
LADDER = tuple(
    point(f"[tune] ladder, {name}", "llama-3.2-3b", at, recipe, gib)
    for name, at, recipe, gib in (
        ("baseline", setup("full", 1024, is_checkpointed=False), TORCHTUNE_EAGER, 25.5),
        ("packed", setup("full", 8192, is_checkpointed=False), TORCHTUNE_EAGER, 60.0),
        (
            "compiled",
            setup("full", 8192, is_checkpointed=False),
            replace(TORCHTUNE, head="naive"),
            51.0,
        ),
        ("chunked loss", setup("full", 8192, is_checkpointed=False), TORCHTUNE, 42.9),
        ("checkpointing", setup("full", 8192, is_checkpointed=True), TORCHTUNE, 24.9),
        ("update in backward", setup("full", 8192, is_checkpointed=True), IN_BACKWARD, 23.1),
        ("activations offloaded", setup("full", 8192, is_checkpointed=True), OFFLOADED, 21.8),
        (
            "8-bit AdamW",
            setup("full", 8192, is_checkpointed=True),
            replace(OFFLOADED, moment_bytes=2),
            17.6,
        ),
        ("LoRA", setup("lora", 8192, is_checkpointed=True, rank=8), ADAPTER, 8.5),
        ("QLoRA", setup("qlora", 8192, is_checkpointed=True, rank=8), ADAPTER, 4.6),
    )
)

PEFT_POINTS = (
    point(
        # The base was loaded in float32; 72 to 80 GB of 80, where the allocator has no slack left.
        "[peft] 70B LoRA, 8 H100",
        "llama-2-70b",
        setup("lora", 8 * 2048, is_checkpointed=True, num_shards=8, rank=8, has_dropout=True),
        replace(HUGGING_FACE, base_bytes=4, slack=0.0),
        76 * GB_IN_GIB,
    ),
    point(
        "[peft] 70B QLoRA, 2 GPUs",
        "llama-2-70b",
        setup("qlora", 2 * 2048, is_checkpointed=True, num_shards=2, rank=8, has_dropout=True),
        HUGGING_FACE,
        35.6 * GB_IN_GIB,
    ),
    point(
        "[peft] 70B QLoRA with offload, 2 GPUs",
        "llama-2-70b",
        setup(
            "qlora",
            2 * 2048,
            is_checkpointed=True,
            num_shards=2,
            rank=8,
            has_dropout=True,
            is_offloaded=True,
        ),
        HUGGING_FACE,
        19.6 * GB_IN_GIB,
    ),
)


ANSWER_POINTS = (
    *(
        point(
            f"[answer] 7B {method}, {tokens} tokens, 2 3090",
            "llama-2-7b",
            on_two_3090s(method, tokens),
            ANSWER_AI,
            gib,
        )
        for method, tokens, gib in (
            ("QLoRA", 512, 4.98),
            ("QLoRA", 2048, 5.21),
            ("QLoRA", 4 * 2048, 11.22),
            ("QLoRA", 10 * 2048, 20.97),
            ("LoRA", 4 * 2048, 16.14),
            ("LoRA", 6 * 2048, 21.35),
        )
    ),
    point(
        "[answer] 70B QLoRA with offload, 2 3090",
        "llama-2-70b",
        on_two_3090s("QLoRA", 2 * 2048, is_offloaded=True),
        ANSWER_AI,
        14.92,
    ),
)

PRIME_POINTS = tuple(
    point(f"[prime] {name}", model, at, PRIME_RL, gib)
    for name, model, at, gib in (
        ("0.6B, 1 H100", "qwen3-0.6b", setup("lora", 16384, is_checkpointed=True), 5.1),
        (
            "4B, 8 H100",
            "qwen3-4b",
            setup("lora", 16384, is_checkpointed=True, num_shards=8),
            11.07,
        ),
        (
            "4B full, 8 H100",
            "qwen3-4b",
            setup("full", 16384, is_checkpointed=True, num_shards=8),
            17.10,
        ),
        (
            "30B-A3B, 8 H200",
            "qwen3-30b-a3b",
            setup("lora", 16384, is_checkpointed=True, num_shards=8),
            31.6,
        ),
    )
)

ONE_LOGIT = replace(TRACKER, head="fused")
FAKE_POINTS = tuple(
    point(f"[fake] {name}", "qwen2.5-7b", at, recipe, gib)
    for name, at, recipe, gib in (
        (
            "8 ranks, AC, all logits",
            setup("lora", 4096, is_checkpointed=True, num_shards=8),
            TRACKER,
            14.2,
        ),
        (
            "2 ranks, AC, all logits",
            setup("lora", 4096, is_checkpointed=True, num_shards=2),
            TRACKER,
            19.7,
        ),
        (
            "8 ranks, AC, one logit",
            setup("lora", 4096, is_checkpointed=True, num_shards=8),
            ONE_LOGIT,
            5.2,
        ),
        (
            "8 ranks, AC, one logit, 16,384 tokens",
            setup("lora", 16384, is_checkpointed=True, num_shards=8),
            ONE_LOGIT,
            11.4,
        ),
        (
            "8 ranks, all logits",
            setup("lora", 4096, is_checkpointed=False, num_shards=8),
            TRACKER,
            38.0,
        ),
        (
            "8 ranks, one logit",
            setup("lora", 4096, is_checkpointed=False, num_shards=8),
            ONE_LOGIT,
            29.1,
        ),
        (
            "full, 8 ranks, AC, all logits",
            setup("full", 4096, is_checkpointed=True, num_shards=8),
            replace(TRACKER, keeps_gradients=False),
            20.5,
        ),
    )
)

POINTS = (
    *TORCHTUNE_POINTS,
    *LADDER,
    *PEFT_POINTS,
    *ANSWER_POINTS,
    *PRIME_POINTS,
    *FAKE_POINTS,
)


@pytest.mark.parametrize("measured", POINTS, ids=lambda measured: measured.name)
def test_a_published_peak_is_met(measured: Point) -> None:
    estimate = peak(KNOWN[measured.model], measured.setup, measured.recipe)
    assert estimate.total / GIB == pytest.approx(measured.gib, rel=BAND)


@pytest.mark.parametrize(
    ("hidden", "num_layers", "num_heads", "mlp", "gb"),
    [
        (4096, 32, 32, 11008, 5.0),
        (5120, 40, 40, 13824, 8.5),
        (6656, 60, 52, 17920, 19.3),
        (8192, 80, 64, 22016, 37.1),
    ],
    ids=["7B", "13B", "33B", "65B"],
)
def test_the_footprint_of_an_nf4_model_is_met(
    hidden: int, num_layers: int, num_heads: int, mlp: int, gb: float
) -> None:
    """[bnb] LLaMA without double quantisation, by the driver: with half a GB of its own."""
    llama = Architecture(
        name="llama",
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=128,
        mlp=mlp,
        vocabulary=32000,
        is_tied=False,
    )
    nothing_trained = setup("qlora", 1, is_checkpointed=True, rank=0)
    held = held_bytes(llama, nothing_trained, Recipe(quant_state_bytes=4 / 64))
    assert (held.frozen + held.quant_state + 0.5e9) / 1e9 == pytest.approx(gb, rel=BAND)
