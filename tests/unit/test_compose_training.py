"""What `make compose-test` has trained."""

from offbeat.contracts.run_spec import RunSpec
from offbeat.specs import load_spec
from scripts.compose.training import FULL_EXAMPLE, short_and_large


def test_all_weights_are_trained_with_a_state_and_a_validation_at_each_step() -> None:
    spec = load_spec(FULL_EXAMPLE)
    run = RunSpec.model_validate(short_and_large(spec).model_dump())
    assert run.lora is None
    assert (run.train.steps, run.train.checkpoint_every, run.eval.every_steps) == (2, 1, 1)
    assert (run.model, run.data, run.sft) == (spec.model, spec.data, spec.sft)
