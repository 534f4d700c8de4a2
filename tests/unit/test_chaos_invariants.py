"""Each violation of an invariant is found in a history that has it, and none in one that has
none."""

from dataclasses import replace
from typing import Any

import pytest

from scripts.chaos.history import (
    EventRecord,
    GroupRecord,
    History,
    SampleRecord,
    StoredFile,
    TrainRecord,
    VersionRecord,
)
from scripts.chaos.invariants import violations


def sha(version: int) -> str:
    return f"{version:064x}"


def version(number: int, **changes: Any) -> VersionRecord:
    weights = StoredFile(
        name="adapter_model.safetensors",
        sha256=sha(number),
        size_bytes=100,
        stored_sha256=sha(number),
        stored_size_bytes=100,
    )
    record = VersionRecord(
        version=number,
        parent=number - 1 if number else None,
        prefix=f"runs/r/versions/{number:06d}-job-1/",
        adapter_sha256=sha(number),
        files=[weights],
        published_at=1_000.0 + number,
        is_in_store=True,
    )
    return replace(record, **changes)


def group(index: int, policy_version: int, step: int | None, **changes: Any) -> GroupRecord:
    sample = SampleRecord(policy_version=policy_version, adapter_sha256=sha(policy_version))
    record = GroupRecord(
        index=index,
        group_id=f"g{index:06d}",
        status="trained" if step else "dropped",
        policy_version=policy_version,
        adapter_sha256=sha(policy_version),
        trained_step=step,
        samples=[sample, sample] if step else [],
    )
    return replace(record, **changes)


def history(**changes: Any) -> History:
    """Two steps: the first from group 0, the second from group 2; group 1 was dropped."""
    published = [EventRecord(kind="version_published", version=number) for number in range(3)]
    dropped = EventRecord(kind="groups_dropped", group_ids=["g000001"])
    good = History(
        status="succeeded",
        status_reason="all 2 steps are done",
        steps=2,
        max_versions=1,
        group_size=2,
        version=2,
        num_groups=3,
        versions=[version(0), version(1), version(2)],
        groups=[group(0, 0, 1), group(1, 0, None), group(2, 0, 2)],
        trained=[
            TrainRecord(job_id="a", version=1, group_ids=["g000000"]),
            TrainRecord(job_id="b", version=2, group_ids=["g000002"]),
        ],
        open_job_ids=[],
        jobs_redone=0,
        events=[*published, dropped],
    )
    return replace(good, **changes)


def test_a_good_history_violates_nothing() -> None:
    assert violations(history()) == []


def test_a_run_without_any_version_is_only_unfinished() -> None:
    empty = history(
        status="failed",
        status_reason="bad data",
        version=None,
        num_groups=0,
        versions=[],
        groups=[],
        trained=[],
        events=[],
    )
    assert violations(empty) == ["the run is failed: bad data"]


def test_a_missing_version_is_found() -> None:
    found = violations(history(versions=[version(0), version(2)]))
    assert found[0] == "the published versions are [0, 2]: one is missing or comes twice"


def test_databases_that_disagree_are_found() -> None:
    found = violations(history(version=1, status="cancelled", status_reason="why"))
    assert found == [
        "the orchestrator is at version 1, the weight-proxy at 2",
        "the run is cancelled: why",
    ]


def test_a_version_that_was_announced_twice_is_found() -> None:
    twice = [*history().events, EventRecord(kind="version_published", version=2)]
    assert violations(history(events=twice)) == [
        "the log tells of versions [0, 1, 2, 2], published were [0, 1, 2]"
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parent": None}, "version 2 has parent None"),
        (
            {"prefix": "runs/r/versions/000001-job-1/"},
            "2 versions share the prefix runs/r/versions/000001-job-1/",
        ),
        (
            {"is_in_store": False},
            "the manifest of version 2 in the store is missing or another one",
        ),
    ],
)
def test_a_wrong_version_record_is_found(changes: dict[str, Any], expected: str) -> None:
    versions = [version(0), version(1), version(2, **changes)]
    assert violations(history(versions=versions)) == [expected]


@pytest.mark.parametrize(
    "stored",
    [
        {"stored_sha256": None, "stored_size_bytes": None},
        {"stored_sha256": sha(1)},
        {"stored_size_bytes": 50},
    ],
)
def test_bytes_that_are_not_those_of_the_manifest_are_found(stored: dict[str, Any]) -> None:
    file = replace(version(2).files[0], **stored)
    versions = [version(0), version(1), version(2, files=[file])]
    assert violations(history(versions=versions)) == [
        "adapter_model.safetensors of version 2 is not what its manifest says"
    ]


def test_a_group_that_is_too_old_is_found() -> None:
    assert violations(history(max_versions=0)) == [
        "group g000002 was 1 versions behind, 0 are allowed"
    ]


def test_a_group_from_the_future_is_found() -> None:
    groups = [group(0, 1, 1), group(1, 0, None), group(2, 0, 2)]
    assert violations(history(groups=groups)) == [
        "group g000000 was -1 versions behind, 1 are allowed"
    ]


def test_a_hash_that_was_never_published_is_found() -> None:
    strange = SampleRecord(policy_version=0, adapter_sha256=sha(9))
    groups = [group(0, 0, 1, samples=[strange, strange]), group(1, 0, None), group(2, 0, 2)]
    assert violations(history(groups=groups)) == [
        "group g000000 was sampled from version 0 under a hash never published"
    ]


def test_a_booking_that_contradicts_the_samples_is_found() -> None:
    wrong = replace(group(2, 0, 2), policy_version=1)
    groups = [group(0, 0, 1), group(1, 0, None), wrong]
    assert violations(history(groups=groups)) == [
        "group g000002 is booked under version 1 but sampled from 0",
        "group g000002 is booked under a hash that version 1 never had",
    ]


def test_missing_samples_are_found() -> None:
    groups = [group(0, 0, 1), group(1, 0, None), group(2, 0, 2, samples=[])]
    found = violations(history(groups=groups))
    assert found[0] == "group g000002 has 0 samples in the store, not 2"


def test_a_group_that_two_steps_used_is_found() -> None:
    trained = [
        TrainRecord(job_id="a", version=1, group_ids=["g000000"]),
        TrainRecord(job_id="b", version=2, group_ids=["g000000", "g000002"]),
    ]
    assert violations(history(trained=trained)) == [
        "group g000000 was trained 2 times",
        "group g000000 is booked under step 1, no job's step",
    ]


def test_two_jobs_that_made_one_version_are_found() -> None:
    trained = [*history().trained, TrainRecord(job_id="c", version=2, group_ids=[])]
    assert violations(history(trained=trained)) == ["2 train jobs made version 2"]


def test_a_group_that_vanished_is_found() -> None:
    assert violations(history(groups=[group(0, 0, 1), group(2, 0, 2)])) == [
        "3 groups were started, 2 are known"
    ]


def test_a_dropped_group_without_an_event_is_found() -> None:
    silent = [event for event in history().events if event.kind != "groups_dropped"]
    assert violations(history(events=silent)) == [
        "group g000001 was dropped, and no event says why"
    ]


def test_an_end_with_open_work_is_found() -> None:
    groups = [group(0, 0, 1), group(1, 0, None, status="ready"), group(2, 0, 2)]
    assert violations(history(groups=groups, open_job_ids=["job-1"])) == [
        "group g000001 is still ready",
        "job job-1 is still open",
    ]


def test_a_success_before_the_last_step_is_found() -> None:
    assert violations(history(steps=3)) == ["the run succeeded at version 2 of 3"]
