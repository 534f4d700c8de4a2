"""Token metrics on numbers that can be worked out by hand."""

import math

import pytest
import torch

from offbeat.contracts.run_spec import TrainSection
from services.trainer.batch import StepBatch
from services.trainer.gradient import TokenRecord
from services.trainer.metrics import reward_metrics, sample_metrics, token_metrics
from tests.specs import spec
from tests.unit.trainer.rollouts import rollout

RATIO = torch.tensor([1.0, 1.5, 0.5, 1.0, 1.2, 5.0])
RECORD = TokenRecord(
    logprobs_N=RATIO.log() - 1.0,
    behaviour_logprobs_N=torch.full((6,), -1.0),
    ratio_N=RATIO,
    weights_N=RATIO.clamp(max=2.0),
    entropy_N=torch.full((6,), 0.25),
    advantages_N=torch.tensor([0.5, 0.5, -0.5, -0.5, -0.5, -0.5]),
    samples_N=torch.tensor([0, 0, 2, 2, 2, 2]),
    kl_N=torch.empty(0),
)
SAMPLES = [
    rollout(0, reward=1.0, version=4, ids=(1, 2)),
    rollout(1, reward=None, version=4, ids=(1,)),
    rollout(2, reward=0.0, version=2, ids=(1, 2, 3, 4), finish_reason="length"),
]


def test_token_metrics_are_over_forwarded_tokens() -> None:
    metrics = token_metrics(RECORD, SAMPLES, 4, TrainSection(steps=1))
    assert metrics == pytest.approx(
        {
            "ratio": 10.2 / 6,
            "ratio/staleness_0": 1.25,
            "entropy": 0.25,
            "sampling/sampling_logp_difference/mean": (
                math.log(1.5) + math.log(2) + math.log(1.2) + math.log(5)
            )
            / 6,
            "sampling/sampling_logp_difference/max": math.log(5),
            "sampling/importance_sampling_ratio/min": 0.5,
            "sampling/importance_sampling_ratio/mean": 7.2 / 6,
            "sampling/importance_sampling_ratio/max": 2.0,
            "sampling/importance_sampling_capped": 1 / 6,
            "sampling/importance_sampling_masked": 0.0,
            "clip_ratio/low_mean": 1 / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 6,
            "clip_ratio/high_max": 0.5,
            "clip_ratio/region_mean": 2 / 6,
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(
    ("train", "clipped"),
    [
        (TrainSection(steps=1, loss="cispo"), {"cispo_clip_ratio": 1 / 6}),
        (TrainSection(steps=1, loss="sapo"), {}),
        (TrainSection(steps=1, loss="dppo", correction="none"), {}),
    ],
)
def test_a_loss_without_the_clip_of_ppo_does_not_report_one(
    train: TrainSection, clipped: dict[str, float]
) -> None:
    metrics = token_metrics(RECORD, SAMPLES, 4, train)
    assert {name: metrics[name] for name in metrics if "clip" in name} == pytest.approx(clipped)


def test_masked_tokens_are_counted() -> None:
    record = TokenRecord(**{**vars(RECORD), "weights_N": torch.tensor([1, 0, 0, 1, 1.2, 0])})
    metrics = token_metrics(record, SAMPLES, 4, TrainSection(steps=1, correction="mis"))
    assert metrics["sampling/importance_sampling_masked"] == 0.5
    assert metrics["sampling/importance_sampling_capped"] == 0.0


def test_the_ratio_of_fresh_samples_is_absent_where_there_are_none() -> None:
    assert "ratio/staleness_0" not in token_metrics(RECORD, SAMPLES, 9, TrainSection(steps=1))


def test_a_certain_engine_leaves_every_metric_finite() -> None:
    """The manifest refuses infinity."""
    record = TokenRecord(**{**vars(RECORD), "behaviour_logprobs_N": torch.full((6,), -1e4)})
    metrics = token_metrics(record, SAMPLES, 4, TrainSection(steps=1))
    assert all(math.isfinite(value) for value in metrics.values())


def test_sample_metrics_count_every_sample_and_take_staleness_at_training_time() -> None:
    assert sample_metrics(SAMPLES, 5) == pytest.approx(
        {
            "completions/mean_length": 7 / 3,
            "completions/min_length": 1,
            "completions/max_length": 4,
            "completions/clipped_ratio": 1 / 3,
            "num_tokens": 7 + 3 * 2,
            "sample/staleness_mean": 5 / 3,
            "sample/staleness_max": 3,
        }
    )


def test_reward_metrics_leave_out_what_could_not_be_scored() -> None:
    groups = [SAMPLES, [rollout(0, reward=0.5, version=4, ids=(1,))]]
    batch = StepBatch.of_groups([tuple(group) for group in groups], spec())
    assert reward_metrics(batch) == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": (1 / 6) ** 0.5,
            "rewards/exact_match": 0.5,
            "frac_reward_zero_std": 0.25,
        }
    )
