"""The object store: four verbs over bytes, and S3 behind them.

`put` overwrites, `get` returns exactly what was put or raises, `size_bytes` sees what was put,
`list` sees every key below a prefix however many there are. Nothing relies on conditional
writes or on the store's checksums: order comes from SQL and the weight-proxy, hashes from the
manifests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from offbeat.errors import ObjectNotFoundError, UnavailableError
from offbeat.settings import ObjectStoreSettings

if TYPE_CHECKING:
    from botocore.client import BaseClient

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
ATTEMPTS_MAX = 5
"""Tries inside one call, with botocore's standard back-off: rides out bursts of 500 and 503."""


class ObjectStore(Protocol):
    """Bytes under keys."""

    def put(self, key: str, body: bytes) -> None:
        """Store the bytes; an object that is there is replaced."""
        ...

    def get(self, key: str) -> bytes:
        """The bytes. Raises `ObjectNotFoundError` or `UnavailableError`."""
        ...

    def download(self, key: str, path: Path) -> None:
        """Write the object to a file without holding it in memory."""
        ...

    def size_bytes(self, key: str) -> int | None:
        """The object's size, or None where there is no such object."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Every key that begins with the prefix, in order."""
        ...


class S3ObjectStore:
    """An S3-compatible bucket. Safe to share between threads, as boto3 clients are."""

    def __init__(self, client: "BaseClient", bucket: str) -> None:
        self._client = client
        self.bucket = bucket

    @classmethod
    def connect(cls, settings: ObjectStoreSettings) -> "S3ObjectStore":
        """Build the client; nothing is sent yet.

        The checksum settings keep botocore from adding trailers that S3-compatible servers refuse
        or store as data (boto3#4398, gofakes3#17).
        """
        client = boto3.client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            aws_access_key_id=settings.access_key_id,
            aws_secret_access_key=settings.secret_access_key.get_secret_value(),
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
                max_pool_connections=32,
            ),
        )
        return cls(client, settings.bucket)

    def with_bucket(self, bucket: str) -> "S3ObjectStore":
        """Another bucket of the same server, with the same credentials."""
        return S3ObjectStore(self._client, bucket)

    def ping(self) -> None:
        """Raise `UnavailableError` unless the bucket answers."""
        try:
            self._client.head_bucket(Bucket=self.bucket)
        except (BotoCoreError, ClientError) as error:
            raise UnavailableError(f"bucket {self.bucket!r} does not answer: {error}") from error

    def create_bucket(self) -> None:
        """Make the bucket; one that is there already is fine."""
        try:
            self._client.create_bucket(Bucket=self.bucket)
        except ClientError as error:
            if _code(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise _translated(error, self.bucket) from error
        except BotoCoreError as error:
            raise UnavailableError(f"cannot make bucket {self.bucket!r}: {error}") from error

    def put(self, key: str, body: bytes) -> None:
        """See `ObjectStore.put`."""
        try:
            self._client.put_object(Bucket=self.bucket, Key=key, Body=body)
        except (BotoCoreError, ClientError) as error:
            raise _translated(error, key) from error

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        try:
            return self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        except (BotoCoreError, ClientError) as error:
            raise _translated(error, key) from error

    def download(self, key: str, path: Path) -> None:
        """See `ObjectStore.download`."""
        try:
            self._client.download_file(self.bucket, key, str(path))
        except (BotoCoreError, ClientError) as error:
            raise _translated(error, key) from error

    def size_bytes(self, key: str) -> int | None:
        """See `ObjectStore.size_bytes`."""
        try:
            return int(self._client.head_object(Bucket=self.bucket, Key=key)["ContentLength"])
        except ClientError as error:
            if _code(error) in {"404", "NoSuchKey", "NotFound"}:
                return None
            raise _translated(error, key) from error
        except BotoCoreError as error:
            raise _translated(error, key) from error

    def list(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list`."""
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield entry["Key"]
        except (BotoCoreError, ClientError) as error:
            raise _translated(error, prefix) from error


def split_s3_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/some/key` -> `("bucket", "some/key")`; ValueError for anything else."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket or not key:
        raise ValueError(f"{uri!r} is not an s3:// address: write s3://bucket/key")
    return bucket, key


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translated(error: BotoCoreError | ClientError, key: str) -> UnavailableError:
    if isinstance(error, ClientError) and _code(error) in {"404", "NoSuchKey", "NotFound"}:
        return ObjectNotFoundError(f"no object under {key!r}")
    return UnavailableError(f"the object store failed on {key!r}: {error}")
