"""What `scripts/smoke.py` submits, and how it judges."""

from offbeat.specs import load_spec
from scripts.smoke import EXAMPLE, gain, small


def test_the_run_is_the_example_with_fewer_steps_and_without_evaluations() -> None:
    spec = load_spec(EXAMPLE)
    run = small(spec, 5)
    assert (run.name, run.train.steps, run.eval.every_steps) == ("smoke", 5, 0)
    assert run.train.learning_rate == spec.train.learning_rate
    assert (run.data, run.rewards, run.rollout) == (spec.data, spec.rewards, spec.rollout)


def test_the_gain_is_between_the_first_and_the_last_quarter() -> None:
    assert gain([0.0, 0.5, 9.0, 9.0, 9.0, 9.0, 0.5, 1.0]) == (0.25, 0.75)
    assert gain([0.5, 1.0]) == (0.5, 1.0)
    assert gain([0.5]) == (0.5, 0.5)
