"""reasoning-gym's own score of the extracted answer."""

from collections.abc import Sequence

from offbeat.contracts.run_spec import ReasoningGymReward
from offbeat.data.gym_entry import ENTRY_COLUMN, GymEntry
from offbeat.rewards.extraction import extract
from offbeat.rewards.scores import RewardSample


def score_gym(
    part: ReasoningGymReward, samples: Sequence[RewardSample]
) -> list[float | BaseException]:
    """One score a sample, or what the grader raised over it: some evaluate the answer as code."""
    return [_score(part, sample) for sample in samples]


def _score(part: ReasoningGymReward, sample: RewardSample) -> float | BaseException:
    entry = GymEntry.from_literal(str(sample.columns[ENTRY_COLUMN]))
    try:
        return entry.score(extract(part, sample.completion))
    except BaseException as error:  # noqa: BLE001 - `exit()` is an answer too, and costs one sample
        return error
