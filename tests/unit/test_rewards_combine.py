"""The weighted sum, by hand."""

from offbeat.contracts.run_spec import RegexReward, RewardSection
from offbeat.rewards.combine import combine, weighted_sum
from offbeat.rewards.scores import PartScores, SampleScore


def test_a_part_without_a_score_is_left_out_and_none_at_all_is_none() -> None:
    assert weighted_sum([1.0, 0.5], [1.0, 1.0]) == 1.5
    assert weighted_sum([1.0, 0.5], [None, 1.0]) == 0.5
    assert weighted_sum([1.0, -2.0], [0.25, 0.5]) == -0.75
    assert weighted_sum([1.0, 0.5], [None, None]) is None
    assert weighted_sum([1.0], [0.0]) == 0.0


def test_a_sum_beyond_every_float_is_no_reward() -> None:
    assert weighted_sum([1e300], [1e300]) is None
    assert weighted_sum([1e300, -1e300], [1e300, 1e300]) is None


def test_every_sample_keeps_its_parts_unweighted() -> None:
    parts: list[RewardSection] = [
        RegexReward(type="regex", pattern="a", name="first", weight=2.0),
        RegexReward(type="regex", pattern="b", weight=0.1),
    ]
    scored = [PartScores(values=(1.0, None, None)), PartScores(values=(0.5, 1.0, None))]
    assert combine(parts, scored) == (
        SampleScore(reward=2.05, rewards={"first": 1.0, "regex": 0.5}),
        SampleScore(reward=0.1, rewards={"first": None, "regex": 1.0}),
        SampleScore(reward=None, rewards={"first": None, "regex": None}),
    )
