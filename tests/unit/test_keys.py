"""Keys say what wrote them."""

import pytest

from offbeat import keys
from offbeat.keys import AttemptKey


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        (keys.prompts("run-a", "job-1", 2, "eval"), ("prompts", None, "job-1", 2, "eval.parquet")),
        (keys.rollouts("run-a", "job-1", 12), ("rollouts", None, "job-1", 12, "parquet")),
        (keys.evaluation("run-a", 7, "job-1", 1), ("evals", 7, "job-1", 1, "parquet")),
        (
            keys.version_prefix("run-a", 1_234_567, "job-1", 3) + "adapter_config.json",
            ("versions", 1_234_567, "job-1", 3, "adapter_config.json"),
        ),
    ],
)
def test_a_key_is_taken_apart_again(key: str, parts: tuple[str, int | None, str, int, str]) -> None:
    folder, version, job_id, attempt, name = parts
    assert keys.parse(key) == AttemptKey(
        folder=folder, version=version, job_id=job_id, attempt=attempt, name=name
    )
    assert key.startswith(keys.run_prefix("run-a"))


@pytest.mark.parametrize(
    "key",
    [
        keys.manifest("run-a", 3),
        keys.skipped_batch("run-a", 3, "job-1", 1),
        keys.version_prefix("run-a", 3, "job-1", 1),
        keys.rollouts("run-a", "job-1", 1) + "/more",
        "runs/run-a/rollouts/job.parquet",
        "other/run-a/rollouts/job-1-1.parquet",
    ],
)
def test_other_keys_are_left_alone(key: str) -> None:
    assert keys.parse(key) is None
