from pathlib import Path

from offbeat.specs import load_spec
from scripts.bench.learning_run import LearningPoint, LearningRun, learning_spec
from scripts.bench_learning import seed_figures, summary


def run(launched_at: float, began_at: float, *rewards: float) -> LearningRun:
    points = tuple(
        LearningPoint(at=began_at + 10.0 * step, reward=reward)
        for step, reward in enumerate(rewards, start=1)
    )
    return LearningRun(launched_at=launched_at, began_at=began_at, points=points)


OFFBEAT = run(100.0, 130.0, 0.5, 0.6, 0.6, 0.6, 0.7)
TRL = run(200.0, 210.0, *[0.1] * 19, *[0.6] * 5)
NEVER = run(0.0, 1.0, 0.1, 0.2)


def test_start_up_counts_in_one_ratio_and_not_in_the_other() -> None:
    figures = seed_figures(1, OFFBEAT, TRL)
    assert (figures["offbeat_wall_s"], figures["trl_wall_s"]) == (80.0, 250.0)
    assert figures["wall_ratio"] == 3.125
    assert figures["wall_ratio_without_start_up"] == 4.8


def test_a_run_that_never_reaches_the_goal_has_a_curve_but_no_time_and_no_ratio() -> None:
    figures = seed_figures(1, OFFBEAT, NEVER)
    assert figures["trl_wall_s"] is None
    assert figures["wall_ratio"] is None
    assert figures["trl_curve"] == [(11.0, 0.1), (21.0, 0.2)]


def test_the_median_is_over_the_seeds_in_which_both_reached_the_goal() -> None:
    seeds = [seed_figures(1, OFFBEAT, TRL), seed_figures(2, OFFBEAT, NEVER)]
    assert summary(seeds)["wall_ratio"] == 3.125
    assert summary(seeds[1:])["wall_ratio"] is None


def test_both_contenders_get_the_example_with_the_seed_and_no_evaluation() -> None:
    spec = learning_spec(load_spec(Path("examples/chain_sum.toml")), seed=7, steps_max=9)
    assert (spec.data.seed, spec.data.shuffle, spec.data.eval_size) == (7, False, 0)
    assert (spec.train.seed, spec.train.steps, spec.eval.every_steps) == (7, 9, 0)
    assert spec.train.learning_rate == 3e-4
