"""From a `data` section to its rows: one function a source."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.contracts.data_sources import DataSection
from offbeat.data.files import jsonl_rows, parquet_rows
from offbeat.data.gym import gym_rows
from offbeat.data.hub import huggingface_rows
from offbeat.data.inline import inline_rows
from offbeat.data.rows import RowReader, SourceRow, bounded, checked_row
from offbeat.objects import S3ObjectStore

SOURCES: Mapping[str, Callable[[Any, Any, RowReader], Iterator[SourceRow]]] = {
    "reasoning_gym": lambda section, _store, read: gym_rows(section, read),
    "jsonl": jsonl_rows,
    "parquet": parquet_rows,
    "huggingface": lambda section, _store, read: huggingface_rows(section, read),
    "inline": lambda section, _store, read: inline_rows(section, read),
}


def source_rows(
    section: DataSection, store: S3ObjectStore, read: RowReader = checked_row
) -> Iterator[SourceRow]:
    """The rows of the source, lazily and in its own order, each one checked by `read`.

    Raises `InvalidDataError` naming the first wrong row, `UnavailableError` where the source does
    not answer.
    """
    return bounded(SOURCES[section.source](section, store, read))
