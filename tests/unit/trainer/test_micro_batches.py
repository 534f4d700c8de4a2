"""How a step's groups become rows when the token budget is left to the trainer."""

import pytest
import torch

from services.trainer.batch import StepBatch
from services.trainer.gradient import micro_batches
from tests.specs import spec
from tests.unit.trainer.rollouts import rollout


@pytest.mark.parametrize(
    ("prompt_tokens", "completion_tokens", "shapes"),
    [
        # 82 tokens: the whole group is less than fills a CPU.
        (2, 20, [(1, 82)]),
        # Two tokens of prompt cost nothing beside 300 of a completion: a row each.
        (2, 300, [(1, 302)] * 4),
        # 8 x 100 + 300 tokens are enough: three completions, and the fourth for itself.
        (100, 300, [(1, 1000), (1, 400)]),
        # Less than 8 x 200 tokens in all: the prompt is computed once.
        (200, 300, [(1, 1400)]),
        # A row has 2048 tokens at most.
        (600, 500, [(1, 1600), (1, 1600)]),
    ],
)
def test_a_row_holds_enough_completions_that_its_prompt_hardly_counts(
    prompt_tokens: int, completion_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    samples = [
        rollout(number, reward=float(number), version=0, ids=(7,) * completion_tokens)
        for number in range(4)
    ]
    group = tuple(
        sample.model_copy(update={"prompt_ids": (5,) * prompt_tokens}) for sample in samples
    )
    run = spec(train={"token_budget": "auto"})
    batches = micro_batches(StepBatch.of_groups([group], run), run, torch.device("cpu"))
    assert [tuple(batch.ids_BT.shape) for batch in batches] == shapes
