"""The object store, on a real S3 server."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from botocore.awsrequest import AWSPreparedRequest

from offbeat.errors import IntegrityError, ObjectNotFoundError
from offbeat.objects import S3ObjectStore, split_s3_uri


def test_p7_p8_p9_what_was_put_is_what_comes_back(
    store: S3ObjectStore, run_id: str, tmp_path: Path
) -> None:
    body = bytes(range(256)) * 5000
    store.put(f"{run_id}/a", b"first")
    store.put(f"{run_id}/a", body)
    store.download(f"{run_id}/a", tmp_path / "a")
    assert store.get(f"{run_id}/a") == body
    assert (tmp_path / "a").read_bytes() == body
    assert store.size_bytes(f"{run_id}/a") == 1_280_000


def test_p7_p8_nothing_is_sent_but_the_bytes(store: S3ObjectStore, run_id: str) -> None:
    """No checksum that a server would refuse, and no trailer that it would store as data."""
    sent: list[AWSPreparedRequest] = []

    def note(request: AWSPreparedRequest, **_: object) -> None:
        sent.append(request)

    client = store._client
    client.meta.events.register("before-send.s3", note)
    try:
        store.put(f"{run_id}/a", b"123")
        assert store.get(f"{run_id}/a") == b"123"
    finally:
        client.meta.events.unregister("before-send.s3", note)
    put, get = ({name.lower(): value for name, value in one.headers.items()} for one in sent)
    assert put["content-length"] in ("3", b"3")
    odd = ("x-amz-checksum", "x-amz-trailer", "x-amz-sdk-checksum", "content-encoding")
    assert not [name for name in (*put, *get) if name.startswith(odd)]


def test_p11_an_address_signed_beforehand_takes_a_plain_put(
    store: S3ObjectStore, run_id: str
) -> None:
    key = f"{run_id}/signed"
    address = store._client.generate_presigned_url(
        "put_object", Params={"Bucket": store.bucket, "Key": key}
    )
    assert "checksum" not in address.lower()
    assert httpx.put(address, content=b"body").status_code == 200
    assert store.get(key) == b"body"


def test_a_missing_object_has_no_size_and_raises(store: S3ObjectStore, run_id: str) -> None:
    assert store.size_bytes(f"{run_id}/missing") is None
    with pytest.raises(ObjectNotFoundError, match="no object under"):
        store.get(f"{run_id}/missing")


def test_an_object_of_another_size_is_not_read(store: S3ObjectStore, run_id: str) -> None:
    key = f"{run_id}/sized"
    store.put(key, b"four")
    assert store.get(key, size_bytes=4) == b"four"
    with pytest.raises(IntegrityError, match="has 4 bytes, not 3"):
        store.get(key, size_bytes=3)
    assert store.get(key) == b"four", "the connection is whole"


def test_p10_a_listing_sees_past_the_first_thousand_keys(store: S3ObjectStore, run_id: str) -> None:
    expected = [f"{run_id}/many/{index:04d}" for index in range(1100)]
    for key in expected:
        store.put(key, b"x")
    assert list(store.list(f"{run_id}/many/")) == expected


def test_an_s3_address_has_a_bucket_and_a_key() -> None:
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
