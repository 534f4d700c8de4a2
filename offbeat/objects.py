"""The object store: a few verbs over bytes, and S3 behind them.

`put` overwrites, `get` returns exactly what was put or raises, `size_bytes` sees what was put,
`scan` and `list` see every key below a prefix however many there are, `delete` may be repeated.
Nothing relies on conditional writes or on the store's checksums: order comes from SQL and the
weight-proxy, hashes from the manifests.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import boto3
from boto3.exceptions import RetriesExceededError
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    SSLError,
)
from botocore.exceptions import ConnectionError as StoreConnectionError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter

from offbeat.errors import IntegrityError, ObjectNotFoundError, OutageError, UnavailableError
from offbeat.settings import ObjectStoreSettings

if TYPE_CHECKING:
    from botocore.client import BaseClient

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30
ATTEMPTS_MAX = 5
"""Tries inside one call, with botocore's standard back-off: half a second, for single failures."""
WORKER_RETRY_S = 60.0
"""How long a worker repeats calls while the store is down, holding its job: a server restarts
within it. A service that answers requests does not wait; whoever asked it does."""
RETRY_WAIT_MAX_S = 5.0
SKEWED_CLOCK = "The difference between the request time"
"""Begins the message, under codes that differ from store to store, where this machine's clock is
wrong."""
PASSING_ERRORS = (
    HTTPClientError,
    StoreConnectionError,
    IncompleteReadError,
    RetriesExceededError,
)
"""Connections that are refused, time out or break off."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """An object as a listing shows it."""

    key: str
    size_bytes: int
    modified_at: datetime
    """With a zone, by the store's clock."""


class ObjectStore(Protocol):
    """Bytes under keys."""

    def put(self, key: str, body: bytes) -> None:
        """Store the bytes; an object that is there is replaced."""
        ...

    def get(self, key: str, *, size_bytes: int | None = None) -> bytes:
        """The bytes; an object of another size than the one that is named is refused unread.

        Raises `ObjectNotFoundError`, `IntegrityError` or `UnavailableError`.
        """
        ...

    def download(self, key: str, path: Path) -> None:
        """Write the object to a file without holding it in memory."""
        ...

    def size_bytes(self, key: str) -> int | None:
        """The object's size, or None where there is no such object."""
        ...

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """Every object whose key begins with the prefix, in order of the keys."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Every key that begins with the prefix, in order."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; one that is not there is fine."""
        ...


class S3ObjectStore:
    """An S3-compatible bucket. Safe to share between threads, as boto3 clients are."""

    def __init__(self, client: "BaseClient", bucket: str, retry_for_s: float) -> None:
        self._client = client
        self.bucket = bucket
        self._retry_for_s = retry_for_s

    @classmethod
    def connect(cls, settings: ObjectStoreSettings, *, retry_for_s: float = 0.0) -> "S3ObjectStore":
        """Build the client; nothing is sent yet. Calls that fail because the store is down are
        repeated for `retry_for_s`.

        The checksum settings keep botocore from adding trailers that S3-compatible servers refuse
        or store as data (boto3#4398, gofakes3#17).
        """
        client = boto3.client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            verify=str(settings.ca_file) if settings.ca_file else None,
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
        return cls(client, settings.bucket, retry_for_s)

    def with_bucket(self, bucket: str) -> "S3ObjectStore":
        """Another bucket of the same server, with the same credentials."""
        return S3ObjectStore(self._client, bucket, self._retry_for_s)

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
        self._call(key, lambda: self._client.put_object(Bucket=self.bucket, Key=key, Body=body))

    def get(self, key: str, *, size_bytes: int | None = None) -> bytes:
        """See `ObjectStore.get`."""

        def read() -> bytes:
            found = self._client.get_object(Bucket=self.bucket, Key=key)
            if size_bytes not in (None, found["ContentLength"]):
                found["Body"].close()
                raise _another_size(key, found["ContentLength"], size_bytes)
            return found["Body"].read()

        return self._call(key, read)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`; fewer where the object ends before."""
        if start >= stop:
            return b""
        wanted = f"bytes={start}-{stop - 1}"
        return self._call(
            key,
            lambda: self._client.get_object(Bucket=self.bucket, Key=key, Range=wanted)[
                "Body"
            ].read(),
        )

    def download(self, key: str, path: Path) -> None:
        """See `ObjectStore.download`."""
        self._call(key, lambda: self._client.download_file(self.bucket, key, str(path)))

    def size_bytes(self, key: str) -> int | None:
        """See `ObjectStore.size_bytes`."""
        try:
            head = self._call(key, lambda: self._client.head_object(Bucket=self.bucket, Key=key))
        except ObjectNotFoundError:
            return None
        return int(head["ContentLength"])

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        """See `ObjectStore.scan`."""
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield StoredObject(
                        key=entry["Key"],
                        size_bytes=entry["Size"],
                        modified_at=entry["LastModified"],
                    )
        except (BotoCoreError, ClientError) as error:
            raise _translated(error, prefix) from error

    def list(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list`."""
        return (entry.key for entry in self.scan(prefix))

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`.

        One request a key: the request for many needs a checksum header that S3-compatible servers
        disagree on (boto3#4400).
        """
        with suppress(ObjectNotFoundError):
            self._call(key, lambda: self._client.delete_object(Bucket=self.bucket, Key=key))

    def _call(self, key: str, call: Callable[[], T]) -> T:
        """The client's answer, or its error as one of ours."""

        def once() -> T:
            try:
                return call()
            except (BotoCoreError, ClientError, RetriesExceededError) as error:
                raise _translated(error, key) from error

        return Retrying(
            retry=retry_if_exception(_is_passing),
            wait=wait_exponential_jitter(multiplier=0.2, max=RETRY_WAIT_MAX_S),
            stop=stop_after_delay(self._retry_for_s),
            reraise=True,
        )(once)


def check_size(store: ObjectStore, key: str, size_bytes: int) -> None:
    """Raise `ObjectNotFoundError` or `IntegrityError` unless the object is there and has this
    size."""
    found_bytes = store.size_bytes(key)
    if found_bytes is None:
        raise ObjectNotFoundError(f"no object under {key!r}")
    if found_bytes != size_bytes:
        raise _another_size(key, found_bytes, size_bytes)


def split_s3_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/some/key` -> `("bucket", "some/key")`; ValueError for anything else."""
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not bucket or not key:
        raise ValueError(f"{uri!r} is not an s3:// address: write s3://bucket/key")
    return bucket, key


def _another_size(key: str, found_bytes: int, size_bytes: int | None) -> IntegrityError:
    return IntegrityError(f"{key!r} has {found_bytes} bytes, not {size_bytes}")


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed once the store, or this machine's clock, is well again."""
    return isinstance(error, OutageError) or SKEWED_CLOCK in str(error)


def _is_outage(error: BotoCoreError | ClientError | RetriesExceededError) -> bool:
    """Whether the store is away, or ill: it is the same for everybody."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, PASSING_ERRORS) and not isinstance(error, SSLError)


def _translated(
    error: BotoCoreError | ClientError | RetriesExceededError, key: str
) -> UnavailableError:
    if isinstance(error, ClientError) and _code(error) in {"404", "NoSuchKey", "NotFound"}:
        return ObjectNotFoundError(f"no object under {key!r}")
    kind = OutageError if _is_outage(error) else UnavailableError
    return kind(f"the object store failed on {key!r}: {error}")
