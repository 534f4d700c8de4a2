"""Hostile data files: each is refused in words that name the place, and whoever reads them stays
small."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.contracts.data_sources import JsonlData, ParquetData
from offbeat.data.rows import SourceRow
from offbeat.data.sources import source_rows
from offbeat.errors import InvalidDataError
from offbeat.objects import S3ObjectStore
from scripts.bench.scale_meter import rss_bytes

FINE = b'{"prompt": "fine"}\n'
MANY_VALUES = 2**27
RSS_GROWTH_BYTES_MAX = 64 * 2**20
TOO_MUCH_MEMORY = (
    "is not a readable Parquet file: a few rows of it take over 2147483648 bytes of memory: write "
    "it anew, with shorter rows and smaller row groups"
)


def read(path: Path, store: S3ObjectStore) -> list[SourceRow]:
    section = (
        JsonlData(source="jsonl", uri=str(path))
        if path.suffix == ".jsonl"
        else ParquetData(source="parquet", uri=str(path))
    )
    return list(source_rows(section, store))


def check_refused(path: Path, store: S3ObjectStore, message: str) -> None:
    """In these words, and without taking memory for it."""
    before = rss_bytes(os.getpid())
    with pytest.raises(InvalidDataError) as refused:
        read(path, store)
    assert refused.value.detail == message
    assert rss_bytes(os.getpid()) - before < RSS_GROWTH_BYTES_MAX


HOSTILE_LINES = {
    "100 MB": (
        b'{"prompt": "' + b"x" * 100_000_000 + b'"}',
        "over 1048576 bytes long: write one JSON object a line",
    ),
    "cut off": (
        b'{"prompt": "a", "x":',
        "not JSON: Expecting value at column 21",
    ),
    "nested 1000 deep": (
        b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        "column 'x' is nested over 32 levels deep",
    ),
    "Latin-1": ('{"prompt": "é"}'.encode("latin-1"), "not UTF-8 at byte 12: convert the file"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8 at byte 0: convert the file"),
    "NUL bytes": (bytes(100), "not JSON: Expecting value at column 1"),
    "NUL in text": (b'{"prompt": "a\0b"}', "not JSON: Invalid control character at column 14"),
    "zlib": (zlib.compress(bytes(10**8)), "not UTF-8 at byte 1: convert the file"),
}


@pytest.mark.parametrize("case", HOSTILE_LINES)
def test_a_hostile_line_is_refused(tmp_path: Path, store: S3ObjectStore, case: str) -> None:
    line, message = HOSTILE_LINES[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(FINE + line)
    check_refused(path, store, f"line 2 (row 1): {message}")


def test_an_escaped_nul_is_text_like_any_other(tmp_path: Path, store: S3ObjectStore) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a\\u0000b"}')
    assert [row.prompt for row in read(path, store)] == ["a\0b"]


def long_text(path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["fine", "x" * 2_000_000]}), path)


def repeated_text(path: Path) -> None:
    """8 KB of file for 40 GB of rows."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1000, np.int32)), ["x" * 40_000_000])
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd", store_schema=False)


def compressed_text(path: Path) -> None:
    """5 KB of file for 30 MB of text."""
    pq.write_table(pa.table({"prompt": ["x" * 30_000_000]}), path, compression="zstd")


def many_nulls(path: Path) -> None:
    offsets = pa.array([0, MANY_VALUES], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.nulls(MANY_VALUES))
    pq.write_table(pa.table({"prompt": ["a"], "x": lists}), path)


def nested(path: Path) -> None:
    """A value 40 levels deep."""
    value: object = 1
    for _ in range(40):
        value = [value]
    pq.write_table(pa.table({"prompt": ["a"], "x": [value]}), path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (long_text, "row 1: 2000014 bytes; a row may have 1048576"),
        (repeated_text, TOO_MUCH_MEMORY),
        (compressed_text, "row 0: 30000014 bytes; a row may have 1048576"),
        (many_nulls, TOO_MUCH_MEMORY),
        (nested, "row 0: column 'x' is nested over 32 levels deep"),
    ],
)
def test_a_hostile_table_is_refused(
    tmp_path: Path, store: S3ObjectStore, write: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "rows.parquet"
    write(path)
    expected = message if message.startswith("row") else f"{path} {message}"
    check_refused(path, store, expected)


def table_bytes(path: Path) -> bytearray:
    pq.write_table(pa.table({"prompt": [f"question {n}" for n in range(100)]}), path)
    return bytearray(path.read_bytes())


@pytest.mark.parametrize("cut", ["end", "middle", "footer"])
def test_a_table_that_is_cut_off_or_garbled_is_refused(
    tmp_path: Path, store: S3ObjectStore, cut: str
) -> None:
    path = tmp_path / "rows.parquet"
    body = table_bytes(path)
    if cut == "end":
        del body[-100:]
    elif cut == "middle":
        del body[100:200]
    else:
        body[-200:-8] = b"\xff" * 192
    path.write_bytes(body)
    with pytest.raises(InvalidDataError, match="is not a readable Parquet file"):
        read(path, store)


@pytest.mark.parametrize(("claimed", "found"), [(2**50, 100), (1, 1)])
def test_a_row_count_that_lies_makes_no_rows(
    tmp_path: Path, store: S3ObjectStore, claimed: int, found: int
) -> None:
    """The footer of a table with 100 rows has another number, everywhere."""
    path = tmp_path / "rows.parquet"
    body = bytes(table_bytes(path))
    footer = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    lie = body[footer:-8].replace(zigzag(100), zigzag(claimed))
    assert len(lie) != len(body[footer:-8])
    path.write_bytes(body[:footer] + lie + len(lie).to_bytes(4, "little") + b"PAR1")
    assert [row.prompt for row in read(path, store)] == [f"question {n}" for n in range(found)]


def zigzag(count: int) -> bytes:
    """A number as the footer has it: doubled, seven bits a byte, the lowest first."""
    left, digits = 2 * count, []
    while left >= 128:
        digits.append(left % 128 + 128)
        left //= 128
    return bytes([*digits, left])
