"""Rows of a Hugging Face dataset: on the hub, or a local folder that `datasets` can load."""

from collections.abc import Iterator
from tempfile import TemporaryDirectory

from offbeat.contracts.data_sources import HuggingFaceData
from offbeat.data.rows import RowReader, SourceRow
from offbeat.errors import InvalidDataError, PermanentJobError, UnavailableError


def huggingface_rows(section: HuggingFaceData, read: RowReader) -> Iterator[SourceRow]:
    """The rows of the split, in order."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise PermanentJobError(
            'the source "huggingface" needs the package `datasets` on the workers: '
            "pip install 'offbeat[huggingface]'"
        ) from error
    datasets.disable_progress_bars()
    name = f"dataset {section.dataset!r}, split {section.split!r}"
    with TemporaryDirectory(prefix="offbeat-data-") as folder:
        try:
            table = datasets.load_dataset(section.dataset, split=section.split, cache_dir=folder)
        except ConnectionError as error:
            raise UnavailableError(
                f"{name}: the hub does not answer ({error}): give the workers a way to it, or "
                "write the rows to a Parquet file and use that"
            ) from error
        except (OSError, ValueError, DatasetsError) as error:
            raise InvalidDataError(f"{name} cannot be loaded: {error}") from error
        for index, values in enumerate(table):
            yield read(index=index, values=dict(values), prompt_field=section.prompt_field)
