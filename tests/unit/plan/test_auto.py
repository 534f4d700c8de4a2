from offbeat.contracts.run_spec import RunSpec
from offbeat.plan.auto import decided
from offbeat.plan.known_models import KNOWN
from tests.specs import spec

GIB = 2**30
MODEL = KNOWN["qwen2.5-7b"]


def a_spec(**train: object) -> RunSpec:
    return spec(
        model={"id": "qwen2.5-7b", "dtype": "bfloat16"},
        lora={"rank": 16, "alpha": 32},
        rollout={"group_size": 8, "groups_per_step": 16, "max_new_tokens": 512},
        train={"steps": 2, **train},
    )


def test_auto_becomes_what_fits_the_gpu() -> None:
    large = decided(a_spec(), MODEL, 80 * GIB).train
    assert (large.token_budget, large.gradient_checkpointing) == (4096, False)
    small = decided(a_spec(), MODEL, 24 * GIB).train
    assert small.gradient_checkpointing is True
    assert isinstance(small.token_budget, int)
    assert 768 <= small.token_budget <= 4096


def test_more_gpus_have_more_room() -> None:
    assert decided(a_spec(), MODEL, 24 * GIB, 8).train.gradient_checkpointing is False


def test_what_the_spec_says_stays() -> None:
    asked = a_spec(token_budget=300, gradient_checkpointing=True)
    assert decided(asked, MODEL, 80 * GIB) == asked
