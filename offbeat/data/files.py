"""Rows of a JSON Lines or Parquet table, from a file or from `s3://bucket/key`.

Both are read in pieces: memory holds a line, or a batch, and what the caller keeps.
"""

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from offbeat.contracts.data_sources import JsonlData, ParquetData
from offbeat.data.parquet_reader import parquet_values
from offbeat.data.rows import (
    DATA_BYTES_MAX,
    ROW_BYTES_MAX,
    RowReader,
    SourceRow,
)
from offbeat.errors import InvalidDataError
from offbeat.objects import S3ObjectStore, split_s3_uri


def jsonl_rows(section: JsonlData, store: S3ObjectStore, read: RowReader) -> Iterator[SourceRow]:
    """One row a line; blank lines are passed over but counted."""
    with _on_disk(section.uri, store) as path, path.open("rb") as lines:
        for index in count():
            line = lines.readline(ROW_BYTES_MAX + 1)
            if not line:
                return
            place = f"line {index + 1} (row {index})"
            if len(line) > ROW_BYTES_MAX:
                raise InvalidDataError(
                    f"{place}: over {ROW_BYTES_MAX} bytes long: write one JSON object a line"
                )
            if line.strip():
                yield read(
                    index=index,
                    place=place,
                    values=_parse(place, line),
                    prompt_field=section.prompt_field,
                )


def parquet_rows(
    section: ParquetData, store: S3ObjectStore, read: RowReader
) -> Iterator[SourceRow]:
    """The rows of the table, in order."""
    with _on_disk(section.uri, store) as path:
        for index, values in enumerate(parquet_values(path, section.uri)):
            yield read(index=index, values=values, prompt_field=section.prompt_field)


@contextmanager
def _on_disk(uri: str, store: S3ObjectStore) -> Iterator[Path]:
    if uri.startswith("s3://"):
        with TemporaryDirectory(prefix="offbeat-data-") as folder:
            yield _download(uri, store, Path(folder) / "table")
        return
    if not os.path.isfile(uri):  # unlike Path, it also takes a name that no file system would
        raise InvalidDataError(
            f"there is no file {uri!r} on this worker: put the data where every worker sees it, "
            "or under s3://bucket/key"
        )
    yield Path(uri)


def _download(uri: str, store: S3ObjectStore, path: Path) -> Path:
    try:
        bucket, key = split_s3_uri(uri)
    except ValueError as error:
        raise InvalidDataError(str(error)) from error
    source = store.with_bucket(bucket)
    size_bytes = source.size_bytes(key)
    if size_bytes is None:
        raise InvalidDataError(f"there is no object {uri}: check bucket and key")
    if size_bytes > DATA_BYTES_MAX:
        raise InvalidDataError(f"{uri} has {size_bytes} bytes; {DATA_BYTES_MAX} are allowed")
    source.download(key, path)
    return path


def _parse(place: str, line: bytes) -> Mapping[str, object]:
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{place}: not UTF-8 at byte {error.start}: convert the file") from (
            error
        )
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise InvalidDataError(f"{place}: not JSON: {reason} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidDataError(f"{place}: not usable JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidDataError(f"{place}: not a JSON object: write one object a line")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number: write null")
