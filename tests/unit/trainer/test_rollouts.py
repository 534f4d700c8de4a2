"""Which groups may be trained on, and how a batch numbers its samples."""

import math

import pytest

from offbeat.contracts.run_spec import StalenessSection
from services.trainer.batch import StepBatch
from services.trainer.rollouts import refusal
from tests.specs import spec
from tests.unit.trainer.rollouts import rollout

HASHES = {2: "a" * 64, 3: "b" * 64, 7: None}
DROP, KEEP = (StalenessSection(max_versions=2, policy=policy) for policy in ("drop", "keep"))


@pytest.mark.parametrize(
    ("version", "adapter_sha256", "base_version", "staleness", "reason"),
    [
        (2, "a" * 64, 4, DROP, None),
        (2, "a" * 64, 5, DROP, "version 2 is 3 versions behind"),
        (2, "a" * 64, 5, KEEP, None),
        (3, "a" * 64, 4, DROP, "version 3 was not published with this sample's hash"),
        (7, "a" * 64, 5, DROP, "version 7 was not published with this sample's hash"),
    ],
)
def test_one_bad_sample_refuses_its_group(
    version: int,
    adapter_sha256: str,
    base_version: int,
    staleness: StalenessSection,
    reason: str | None,
) -> None:
    good = rollout(0, reward=1.0, version=3, ids=(1,), adapter_sha256="b" * 64)
    other = rollout(1, reward=1.0, version=version, ids=(1,), adapter_sha256=adapter_sha256)
    assert refusal((good, other), base_version, staleness, HASHES) == reason


def test_samples_are_numbered_through_all_groups_and_empty_ones_have_no_row() -> None:
    groups = [
        (
            rollout(0, reward=1.0, version=0, ids=(10, 11)),
            rollout(1, reward=0.0, version=0, ids=()),
        ),
        (
            rollout(0, reward=0.0, version=0, ids=(20,)),
            rollout(1, reward=None, version=0, ids=(30,)),
            rollout(2, reward=1.0, version=0, ids=(40, 41, 42)),
        ),
        (rollout(0, reward=None, version=0, ids=()),),
    ]
    batch = StepBatch.of_groups(groups, spec())
    expected = [[1.0, 0.0, math.nan], [0.0, math.nan, 1.0], [math.nan] * 3]
    assert batch.rewards_GS.tolist() == [pytest.approx(row, nan_ok=True) for row in expected]
    assert batch.lengths_S.tolist() == [2, 0, 1, 1, 3, 0]
    assert [
        [(one.sample, one.ids, one.advantage) for one in row.completions] for row in batch.rows()
    ] == [
        [(0, (10, 11), 0.5)],
        [(2, (20,), -0.5), (3, (30,), 0.0), (4, (40, 41, 42), 0.5)],
    ]


def test_overlong_samples_lose_reward_before_the_advantages_are_made() -> None:
    """Of at most 4 tokens the last 2 cost a half each."""
    lengths = (2, 3, 4)
    group = tuple(
        rollout(place, reward=1.0, version=0, ids=tuple(range(length)))
        for place, length in enumerate(lengths)
    )
    batch = StepBatch.of_groups([group], spec(train={"overlong_cache": 2}))
    assert batch.rewards_GS.tolist() == [[1.0, 0.5, 0.0]]
    assert batch.advantages_GS.tolist() == [[0.5, 0.0, -0.5]]
