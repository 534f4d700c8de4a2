"""The object store, on a real S3 server."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from offbeat.errors import ObjectNotFoundError
from offbeat.objects import S3ObjectStore, split_s3_uri


def test_what_was_put_is_what_comes_back(store: S3ObjectStore, run_id: str, tmp_path: Path) -> None:
    body = bytes(range(256)) * 5000
    store.put(f"{run_id}/a", b"first")
    store.put(f"{run_id}/a", body)
    store.download(f"{run_id}/a", tmp_path / "a")
    assert store.get(f"{run_id}/a") == body
    assert (tmp_path / "a").read_bytes() == body
    assert store.size_bytes(f"{run_id}/a") == 1_280_000


def test_a_missing_object_has_no_size_and_raises(store: S3ObjectStore, run_id: str) -> None:
    assert store.size_bytes(f"{run_id}/missing") is None
    with pytest.raises(ObjectNotFoundError, match="no object under"):
        store.get(f"{run_id}/missing")


def test_s3_list_sees_past_the_first_thousand_keys(store: S3ObjectStore, run_id: str) -> None:
    """P10: a listing without pagination stops at 1,000."""
    expected = [f"{run_id}/many/{index:04d}" for index in range(1100)]
    for key in expected:
        store.put(key, b"x")
    assert list(store.list(f"{run_id}/many/")) == expected


def test_s3_uri() -> None:
    assert split_s3_uri("s3://bucket/some/key") == ("bucket", "some/key")
    for wrong in ("bucket/key", "s3://bucket", "s3:///key", "http://bucket/key"):
        with pytest.raises(ValueError, match="write s3://bucket/key"):
            split_s3_uri(wrong)


def test_what_was_deleted_is_not_there_and_may_be_deleted_again(
    store: S3ObjectStore, run_id: str
) -> None:
    before = datetime.now(UTC)
    for name, body in (("a", b"12345"), ("b", b"1"), ("c", b"")):
        store.put(f"{run_id}/{name}", body)
    found = list(store.scan(f"{run_id}/"))
    assert [(entry.key, entry.size_bytes) for entry in found] == [
        (f"{run_id}/a", 5),
        (f"{run_id}/b", 1),
        (f"{run_id}/c", 0),
    ]
    assert all(abs(entry.modified_at - before) < timedelta(minutes=5) for entry in found)
    for _ in range(2):
        store.delete(f"{run_id}/b")
    assert list(store.list(f"{run_id}/")) == [f"{run_id}/a", f"{run_id}/c"]
    assert store.size_bytes(f"{run_id}/b") is None
