"""JSON Lines and Parquet tables, local; the way from S3 is in the integration tests."""

from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from offbeat.contracts.data_sources import JsonlData, ParquetData
from offbeat.data.rows import ROW_BYTES_MAX, SourceRow
from offbeat.data.sources import source_rows
from offbeat.errors import InvalidDataError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings


@pytest.fixture
def store() -> S3ObjectStore:
    """A store that nothing here may ask."""
    return S3ObjectStore.connect(
        ObjectStoreSettings(endpoint_url="http://127.0.0.1:1", secret_access_key=SecretStr("x"))
    )


def read_jsonl(path: Path, body: bytes, store: S3ObjectStore) -> list[SourceRow]:
    path.write_bytes(body)
    return list(source_rows(JsonlData(source="jsonl", uri=str(path)), store))


def read_parquet(path: Path, table: pa.Table, store: S3ObjectStore) -> list[SourceRow]:
    pq.write_table(table, path)
    return list(source_rows(ParquetData(source="parquet", uri=str(path)), store))


def test_a_jsonl_row_knows_its_line_and_blank_lines_count(
    tmp_path: Path, store: S3ObjectStore
) -> None:
    body = b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\n{"prompt": "\xc3\xa4"}'
    rows = read_jsonl(tmp_path / "rows.jsonl", body, store)
    assert [(row.place, row.prompt, row.columns) for row in rows] == [
        ("line 1 (row 0)", "a", {"answer": "1"}),
        ("line 3 (row 2)", "ä", {}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": }', "not JSON: Expecting value at column 12"),
        (b'["prompt"]', "not a JSON object: write one object a line"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12: convert the file"),
        (b'{"prompt": "a", "x": NaN}', "not usable JSON: NaN is not a JSON number: write null"),
        (b'{"prompt": "a", "x": 1e999}', "column 'x' is not plain JSON"),
        (b'{"prompt": "a", "x": ' + b"[" * 100_000, "not usable JSON: maximum recursion depth"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "not usable JSON: Exceeds the limit"),
        (b'{"prompt": "\\ud800"}', "column 'prompt' holds half of a surrogate pair"),
        (b"x" * (ROW_BYTES_MAX + 1), "over 1048576 bytes long: write one JSON object a line"),
        (b'{"text": "a"}', r"no column 'prompt' \(it has 'text'\)"),
    ],
)
def test_a_wrong_jsonl_line_is_named(
    line: bytes, message: str, tmp_path: Path, store: S3ObjectStore
) -> None:
    body = b'{"prompt": "fine"}\n' * 17 + line + b"\n"
    with pytest.raises(InvalidDataError, match=r"^line 18 \(row 17\): " + message):
        read_jsonl(tmp_path / "rows.jsonl", body, store)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, store: S3ObjectStore) -> None:
    for uri in (str(tmp_path / "none.jsonl"), str(tmp_path), "/dev/zero", "x" * 1000):
        with pytest.raises(InvalidDataError, match="there is no file"):
            list(source_rows(JsonlData(source="jsonl", uri=uri), store))


def test_parquet_rows_have_the_types_of_json(tmp_path: Path, store: S3ObjectStore) -> None:
    table = pa.table(
        {
            "prompt": [[{"role": "user", "content": "1+1?"}], [{"role": "user", "content": "2"}]],
            "answer": [2, None],
            "tags": [["a"], []],
        }
    )
    rows = read_parquet(tmp_path / "rows.parquet", table, store)
    assert [(row.place, row.prompt, row.columns) for row in rows] == [
        ("row 0", [{"role": "user", "content": "1+1?"}], {"answer": 2, "tags": ["a"]}),
        ("row 1", [{"role": "user", "content": "2"}], {"answer": None, "tags": []}),
    ]


def test_a_wrong_parquet_row_is_named_across_batches(tmp_path: Path, store: S3ObjectStore) -> None:
    prompts = ["fine"] * 300 + [""]
    with pytest.raises(InvalidDataError, match=r"^row 300: 'prompt' is empty"):
        read_parquet(tmp_path / "empty.parquet", pa.table({"prompt": prompts}), store)
    days = pa.table({"prompt": ["a"], "day": [date(2026, 1, 1)]})
    with pytest.raises(InvalidDataError, match=r"^row 0: column 'day' is not plain JSON.*text for"):
        read_parquet(tmp_path / "days.parquet", days, store)
    gaps = pa.table({"prompt": ["a"], "x": [float("nan")]})
    with pytest.raises(InvalidDataError, match=r"^row 0: column 'x' is not plain JSON.*write null"):
        read_parquet(tmp_path / "gaps.parquet", gaps, store)


def test_what_is_no_parquet_is_refused(tmp_path: Path, store: S3ObjectStore) -> None:
    path = tmp_path / "rows.parquet"
    for body in (b"", b"PAR1 this is no table PAR1"):
        path.write_bytes(body)
        with pytest.raises(InvalidDataError, match="is not a readable Parquet file"):
            list(source_rows(ParquetData(source="parquet", uri=str(path)), store))
