"""What an evaluation reports, worked by hand."""

from datetime import UTC, datetime

import pytest

from offbeat.contracts.rollouts import Rollout
from offbeat.tables import PromptRow
from services.generator.evaluate import evaluation_groups, evaluation_metrics, pass_at_k
from services.generator.rows import summary


def row(prompt_id: str, sample: int, reward: float | None, num_tokens: int = 3) -> Rollout:
    return Rollout(
        run_id="run-1",
        job_id="job-1",
        group_id=prompt_id,
        prompt_id=prompt_id,
        sample=sample,
        policy_version=4,
        adapter_sha256="a" * 64,
        prompt_ids=(1,),
        completion_ids=(2,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason="stop",
        prompt="p",
        completion="c",
        reward=reward,
        rewards={"reward": reward},
        generator_id="g",
        engine="transformers",
        sampled_at=datetime.now(UTC),
    )


def test_pass_at_k() -> None:
    # Two of four pass. One draw: 2/4. Two draws: 1 - (2 * 1) / (4 * 3) = 5/6. Three draws cannot
    # all fail.
    assert pass_at_k(4, 2, 1) == 0.5
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 2, 3) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_metrics_of_one_sample_a_prompt() -> None:
    rows = [row("p0", 0, 1.0, 2), row("p1", 0, 0.5, 4)]
    assert evaluation_metrics(rows, 1) == {
        "eval/pass@1": 0.5,
        "eval/reward": 0.75,
        "eval/mean_length": 3.0,
        "eval/num_prompts": 2.0,
    }


def test_metrics_of_several_samples_a_prompt() -> None:
    rows = [row("p0", 0, 1.0), row("p0", 1, 0.0), row("p1", 0, 0.0), row("p1", 1, None)]
    metrics = evaluation_metrics(rows, 2)
    assert metrics["eval/pass@1"] == 0.25
    assert metrics["eval/pass@2"] == 0.5
    assert metrics["eval/reward"] == pytest.approx(1 / 3)


def test_without_any_reward_there_is_no_mean() -> None:
    assert "eval/reward" not in evaluation_metrics([row("p0", 0, None)], 1)


def test_every_version_answers_with_the_same_streams() -> None:
    prompts = [
        PromptRow(prompt_id=f"eval-{k}", prompt="p", prompt_ids=(1,), columns={}) for k in range(2)
    ]
    groups = evaluation_groups(prompts, 3)
    assert [group.seeds for group in groups] == [(0, 1, 2), (3, 4, 5)]
    assert [group.group_id for group in groups] == ["eval-0", "eval-1"]


def test_a_group_is_summed_up_over_the_samples_that_could_be_scored() -> None:
    group = summary([row("g", 0, 1.0, 2), row("g", 1, 0.0, 3), row("g", 2, None, 4)])
    assert (group.reward_mean, group.reward_std) == (0.5, 0.5)
    assert (group.num_samples, group.num_tokens, group.policy_version) == (3, 9, 4)


def test_a_group_that_could_not_be_scored_has_no_mean() -> None:
    group = summary([row("g", 0, None)])
    assert (group.reward_mean, group.reward_std) == (None, None)
