"""What a version's canary says, and how often the ranks must be given an adapter for it."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from torch import Tensor

from offbeat.contracts.run_spec import LoraSection, ModelSection
from services.trainer.canary import first_canary, next_canary
from services.trainer.initial import seeded_adapter
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from tests.ranks import CPU

PROMPT_IDS = (5, 6, 7)


class CountingRanks(Ranks):
    """Counts what is sent to all ranks."""

    num_broadcasts = 0

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """See `Ranks.broadcast`."""
        self.num_broadcasts += 1
        super().broadcast(tensors)


@pytest.fixture
def ranks() -> CountingRanks:
    return CountingRanks()


@pytest.fixture
def policy(tiny_model: Path, ranks: CountingRanks) -> Policy:
    model, lora = ModelSection(id="tiny", dtype="float32"), LoraSection(rank=2)
    return Policy.load(tiny_model, model, lora, CPU, ranks)


def moved(masters: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    return {name: master + by for name, master in masters.items()}


def test_an_adapter_is_shared_once_while_the_canary_s_answer_stays(
    policy: Policy, ranks: CountingRanks
) -> None:
    """What links between machines carry in a step is one adapter and one gradient."""
    version_0 = moved(seeded_adapter(policy.shapes, 0), 0.01)
    version_1 = moved(version_0, 1e-6)
    parent = first_canary(policy, version_0, PROMPT_IDS)
    assert ranks.num_broadcasts == 1
    canary = next_canary(policy, version_1, parent, version_0)
    policy.install(version_1)
    assert ranks.num_broadcasts == 2
    assert canary.completion_ids == parent.completion_ids
    assert canary.parent_logprobs == parent.logprobs != canary.logprobs


def test_a_changed_answer_is_scored_under_the_parent_too(
    policy: Policy, ranks: CountingRanks
) -> None:
    version_0 = seeded_adapter(policy.shapes, 0)
    version_1 = moved(version_0, 0.3)
    parent = first_canary(policy, version_0, PROMPT_IDS)
    canary = next_canary(policy, version_1, parent, version_0)
    assert canary.completion_ids != parent.completion_ids
    assert ranks.num_broadcasts == 3
    policy.install(version_1)
    assert ranks.num_broadcasts == 4
    answer = first_canary(policy, version_1, PROMPT_IDS)
    assert (canary.completion_ids, canary.logprobs) == (answer.completion_ids, answer.logprobs)
    assert canary.parent_logprobs != canary.logprobs
    again = next_canary(policy, version_0, canary, version_1)
    assert (again.completion_ids, again.logprobs) == (parent.completion_ids, parent.logprobs)
