import pytest

from scripts.bench.contender import StepMeasurement
from scripts.bench.figures import RewardPoint, step_figures, time_to_reward
from scripts.bench.matmul import Layers, step_flops


def points(*rewards: float) -> list[RewardPoint]:
    return [RewardPoint(time_s=10.0 * n, reward=r) for n, r in enumerate(rewards, start=1)]


def test_the_goal_is_reached_at_the_last_step_of_the_first_window_whose_mean_is_high_enough() -> (
    None
):
    curve = points(0.0, 1.0, 0.0, 0.5, 0.75, 0.75, 0.0)
    assert time_to_reward(curve, goal=0.625, window=2) == 50.0
    assert time_to_reward(curve, goal=0.5, window=2) == 20.0


def test_a_goal_that_no_window_reaches_has_no_time() -> None:
    assert time_to_reward(points(0.5, 0.5, 0.5), goal=0.6, window=2) is None


def test_fewer_points_than_a_window_reach_nothing() -> None:
    assert time_to_reward(points(1.0, 1.0), goal=0.6, window=5) is None


def test_figures_compare_medians_and_put_trl_over_offbeat_in_time_and_under_it_in_memory() -> None:
    offbeat = StepMeasurement(
        seconds=(2.0, 4.0, 9.0),
        cpu_seconds=(6.0, 8.0, 8.0),
        loaded_bytes=100,
        peak_bytes=300,
        forwarded_tokens=40,
        scored_tokens=20,
    )
    trl = StepMeasurement(
        seconds=(10.0, 14.0),
        cpu_seconds=(20.0, 20.0),
        loaded_bytes=100,
        peak_bytes=1200,
        forwarded_tokens=80,
        scored_tokens=20,
    )
    figures = step_figures("case", offbeat, trl, offbeat_flops=1000, flops_per_s=500.0)
    assert figures.step_ratio == 3.0
    assert figures.cpu_ratio == 2.5
    assert (figures.offbeat_tokens_per_s, figures.trl_tokens_per_s) == (5.0, 20 / 12)
    assert figures.tokens_per_s_ratio == pytest.approx(3.0)
    assert figures.peak_memory_ratio == 0.25
    assert figures.matmul_share == 0.5


def test_a_step_multiplies_the_base_twice_the_adapter_three_times_and_the_head_where_scored() -> (
    None
):
    layers = Layers(linears=((3, 2), (2, 5)), num_blocks=10, head=(7, 2))
    # A block: 2 x (6 + 10) weights of the base, 3 x rank 4 x (5 + 7) of the adapter.
    block = 2 * 16 + 3 * 4 * 12
    assert block == 176
    flops = step_flops(layers, rank=4, forwarded_tokens=100, scored_tokens=50)
    assert flops == 2 * (10 * 176 * 100 + 2 * 14 * 50)
