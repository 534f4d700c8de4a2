"""Lists that a service gives in pages, read through to their end."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from offbeat.contracts.runs import Page

PAGE_ITEMS = 200
"""Items fetched at once by what reads through all pages: the most that the service gives."""

T = TypeVar("T")


def all_pages(fetch: Callable[[str | None], Page[T]]) -> Iterator[T]:
    """Every item of a list: `fetch` gives the page after a cursor, and the first one for None."""
    after: str | None = None
    while True:
        page = fetch(after)
        yield from page.data
        if page.next_cursor in (None, after):
            return
        after = page.next_cursor
