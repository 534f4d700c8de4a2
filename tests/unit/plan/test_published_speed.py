"""The formulas against published speeds: each within 15 %.

Sources: [tune] torchtune's README, "Memory and training speed" and "Optimization flags" (Sept and
Dec 2024); [answer] AnswerDotAI/fsdp_qlora, `benchmarks_03_2024.md`.
"""

from dataclasses import dataclass, replace

import pytest

from offbeat.plan.choice import BAND
from offbeat.plan.gpus import CARDS, Cluster
from offbeat.plan.known_models import KNOWN
from offbeat.plan.setup import Recipe, Setup
from offbeat.plan.speed import step_time
from tests.unit.plan.programs import (
    ADAPTER,
    ANSWER_AI,
    IN_BACKWARD,
    OFFLOADED,
    TORCHTUNE,
    TORCHTUNE_EAGER,
    TORCHTUNE_POINTS,
    on_two_3090s,
    setup,
)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One measurement of tokens a second, of all GPUs."""

    name: str
    model: str
    setup: Setup
    recipe: Recipe
    cards: tuple[int, str]
    tokens_per_s: float
    sequence_tokens: int = 2048


def laddered(name: str, method: str, recipe: Recipe, tokens_per_s: float, *, ac: bool) -> Pace:
    at = setup("full", 8192, is_checkpointed=ac)
    if method != "full":
        at = setup("qlora" if method == "qlora" else "lora", 8192, is_checkpointed=ac, rank=8)
    return Pace(
        name=f"[tune] ladder, {name}",
        model="llama-3.2-3b",
        setup=at,
        recipe=recipe,
        cards=(1, "A100-80GB"),
        tokens_per_s=tokens_per_s,
        sequence_tokens=4096,
    )


def seventy_billion(
    cards: tuple[int, str], batch_size: int, seconds: float, *, is_offloaded: bool = False
) -> Pace:
    """[answer] 1,024 sequences of 2,048 tokens through Llama 2 70B."""
    at = on_two_3090s("QLoRA", batch_size * 2048, is_offloaded=is_offloaded)
    return Pace(
        name=f"[answer] 70B QLoRA, {cards[0]} {cards[1]}",
        model="llama-2-70b",
        setup=replace(at, num_shards=cards[0]),
        recipe=ANSWER_AI,
        cards=cards,
        tokens_per_s=1024 * 2048 / seconds,
    )


PACES = (
    *(
        Pace(
            name=measured.name,
            model=measured.model,
            setup=measured.setup,
            recipe=measured.recipe,
            cards=(8, "A100-80GB"),
            tokens_per_s=tokens_per_s,
        )
        for measured, tokens_per_s in zip(TORCHTUNE_POINTS[3:], (3497, 1568, 653), strict=True)
    ),
    laddered("packed", "full", TORCHTUNE_EAGER, 7075, ac=False),
    laddered("compiled", "full", TORCHTUNE, 8998, ac=False),
    laddered("chunked loss", "full", TORCHTUNE, 9174, ac=False),
    laddered("checkpointing", "full", TORCHTUNE, 7210, ac=True),
    laddered("update in backward", "full", IN_BACKWARD, 7309, ac=True),
    laddered("activations offloaded", "full", OFFLOADED, 7301, ac=True),
    laddered("8-bit AdamW", "full", OFFLOADED, 6960, ac=True),
    laddered("LoRA", "lora", ADAPTER, 8210, ac=True),
    laddered("QLoRA", "qlora", ADAPTER, 8035, ac=True),
    seventy_billion((2, "A5000"), 2, 9688, is_offloaded=True),
    seventy_billion((8, "A5000"), 1, 2613),
    seventy_billion((4, "A100-40GB"), 4, 1266),
    seventy_billion((8, "A100-40GB"), 4, 672),
    seventy_billion((4, "H100"), 8, 667),
    seventy_billion((2, "3090"), 2, 11795, is_offloaded=True),
    seventy_billion((2, "4090"), 2, 4399, is_offloaded=True),
)


@pytest.mark.parametrize("measured", PACES, ids=lambda measured: measured.name)
def test_a_published_speed_is_met(measured: Pace) -> None:
    count, card = measured.cards
    time = step_time(
        KNOWN[measured.model],
        measured.setup,
        measured.recipe,
        Cluster(gpu=CARDS[card], gpus_per_node=count),
        sequence_tokens=measured.sequence_tokens,
    )
    tokens_per_s = count * measured.setup.token_budget / time.step_s(1)
    assert tokens_per_s == pytest.approx(measured.tokens_per_s, rel=BAND)
