"""A trainer that is alone keeps its base model in host memory, without torchrun."""

from pathlib import Path

from torch.distributed.tensor import DTensor

from services.trainer.gradient import Gradient
from services.trainer.initial import seeded_adapter
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.sft_batch import example_batches
from services.trainer.sft_gradient import sft_gradient
from tests.ranks import CPU, alone, assert_same, group_of_one, memory_of, ragged_examples
from tests.specs import sft_spec
from tests.tiny_model import write_tiny_model


def test_its_gradient_is_that_of_a_base_that_is_held_whole(tmp_path: Path) -> None:
    section = {"id": str(write_tiny_model(tmp_path)), "dtype": "float32"}
    run = sft_spec(model=section, train={"token_budget": 64})
    batches = example_batches(ragged_examples(), run.train, CPU)
    whole = alone(run)
    adapter = {name: one + 0.01 for name, one in seeded_adapter(whole.shapes, seed=1).items()}

    def gradient_of(policy: Policy) -> Gradient:
        policy.install(adapter)
        return sft_gradient(policy, batches, run.train, version=1, between=lambda _: None)[0]

    with group_of_one():
        offloaded = memory_of(Ranks(), offload=True).policy(run)
        base = offloaded._adapted.get_base_model()  # pyright: ignore[reportPrivateUsage]
        assert any(isinstance(weight, DTensor) for weight in base.parameters())
        assert_same(gradient_of(offloaded), gradient_of(whole), 1e-6, 1e-4)
