"""1 where a pattern is found in the completion, else 0."""

import re
from collections.abc import Sequence

from offbeat.contracts.run_spec import RegexReward
from offbeat.rewards.scores import RewardSample


def score_regex(part: RegexReward, samples: Sequence[RewardSample]) -> list[float]:
    """One score a sample."""
    pattern = re.compile(part.pattern)
    find = pattern.fullmatch if part.full_match else pattern.search
    return [float(find(sample.completion) is not None) for sample in samples]
