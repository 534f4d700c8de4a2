"""Tables of figures as a terminal shows them."""

from collections.abc import Iterable

from rich.table import Table


def figure_table(title: str, columns: Iterable[str]) -> Table:
    """What a row is about stands in the first column, its figures in these."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
