"""1 where the extracted answer equals a column of the data, else 0."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from offbeat.contracts.run_spec import ExactMatchReward
from offbeat.rewards.extraction import canonical, extract
from offbeat.rewards.scores import RewardSample


def score_exact_match(part: ExactMatchReward, samples: Sequence[RewardSample]) -> list[float]:
    """One score a sample. Text is compared without the white space around it."""
    return [_score(part, sample) for sample in samples]


def _score(part: ExactMatchReward, sample: RewardSample) -> float:
    answer = extract(part, sample.completion)
    expected = canonical(part, _text(sample.columns[part.field]))
    if answer is None:
        return 0.0
    if part.ignore_case:
        answer, expected = answer.casefold(), expected.casefold()
    return float(answer == expected)


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)
