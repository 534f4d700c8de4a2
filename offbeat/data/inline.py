"""Rows that the spec itself carries."""

from collections.abc import Iterator

from offbeat.contracts.data_sources import InlineData
from offbeat.data.rows import RowReader, SourceRow, checked_row


def inline_rows(section: InlineData, read: RowReader = checked_row) -> Iterator[SourceRow]:
    """The rows of `data.rows`, in order."""
    for index, values in enumerate(section.rows):
        yield read(index=index, values=values, prompt_field=section.prompt_field)
