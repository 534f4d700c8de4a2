"""From a `data` section to its rows: one function a source."""

from collections.abc import Callable, Iterator, Mapping

from offbeat.contracts.run_spec import DataSection
from offbeat.data.files import jsonl_rows, parquet_rows
from offbeat.data.gym import gym_rows
from offbeat.data.hub import huggingface_rows
from offbeat.data.inline import inline_rows
from offbeat.data.rows import SourceRow, bounded
from offbeat.objects import S3ObjectStore

SOURCES: Mapping[str, Callable[..., Iterator[SourceRow]]] = {
    "reasoning_gym": lambda section, _store: gym_rows(section),
    "jsonl": jsonl_rows,
    "parquet": parquet_rows,
    "huggingface": lambda section, _store: huggingface_rows(section),
    "inline": lambda section, _store: inline_rows(section),
}


def source_rows(section: DataSection, store: S3ObjectStore) -> Iterator[SourceRow]:
    """The rows of the source, lazily and in its own order, each one checked.

    Raises `InvalidDataError` naming the first wrong row, `UnavailableError` where the source does
    not answer.
    """
    return bounded(SOURCES[section.source](section, store))
