"""JSON from outside, read so that every reader and every database behind it would read the same.

Refused is what some readers take and others do not (a key twice, NaN, a number that no float can
hold), what a database cannot keep (NUL, half of a surrogate pair, integers of more than 64 bits),
and what costs far more memory than it has bytes (nesting, millions of values).
"""

import json
import math
import re
from collections.abc import Iterator, Sequence

from offbeat.contracts.runs import ProblemField
from offbeat.spec_problems import Path, show_path

VALUES_MAX = 100_000
"""Values in one document: bounds the time and memory that it can cost."""
DEPTH_MAX = 64
"""Levels of nesting: far above any request, far below what makes a parser recurse too deeply."""
INTEGER_MAX = 2**63 - 1
"""The largest integer that every database and JSON reader behind the service keeps exact."""
DIGITS_MAX = 40
TOO_DEEP = f"nested more than {DEPTH_MAX} levels deep"
TOO_LARGE = f"has more than {VALUES_MAX:,} values: put the data in a file of its own"

_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""NUL and lone surrogates: PostgreSQL and UTF-8 have no place for them."""


def parse_json(text: str) -> object:
    """The value, with NaN and infinity where they stand: `odd_values` says where.

    ValueError or RecursionError for what is no JSON, or not the same for all readers.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)


def has_many_values(text: str) -> bool:
    """Whether the JSON text has over twice `VALUES_MAX` values, found without making them."""
    bare = _STRING.sub("", text)
    return sum(map(bare.count, ",[{")) > 2 * VALUES_MAX


def is_large(value: object) -> bool:
    """Whether there are more than `VALUES_MAX` values in it."""
    pending: list[object] = [value]
    num_values = 0
    while pending and num_values <= VALUES_MAX:
        value = pending.pop()
        if isinstance(value, dict | list | tuple):
            num_values += len(value)
            pending.extend(value.values() if isinstance(value, dict) else value)
    return num_values > VALUES_MAX


def odd_values(value: object, path: Path = ()) -> Iterator[ProblemField]:
    """What JSON cannot say, or what the database behind the service could not keep."""
    complaint = _complaint(value) if len(path) <= DEPTH_MAX else TOO_DEEP
    if complaint:
        yield ProblemField(field=show_path(path), message=complaint)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from odd_values(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from odd_values(inner, (*path, index))


def first_repeated(keys: Sequence[str]) -> int | None:
    """The place of the first key that stood before."""
    seen: set[str] = set()
    for index, key in enumerate(keys):
        if key in seen:
            return index
        seen.add(key)
    return None


def _integer(digits: str) -> int:
    """More digits than these only make it larger, and take long to convert."""
    return int(digits[:DIGITS_MAX])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    twice = first_repeated([key for key, _ in pairs])
    if twice is not None:
        raise ValueError(f"the key {pairs[twice][0]!r:.80} is given twice")
    return dict(pairs)


def _complaint(value: object) -> str | None:
    match value:
        case None | bool():
            return None
        case str():
            return _text_complaint(value)
        case int():
            return None if abs(value) <= INTEGER_MAX else "the number is too large"
        case float():
            return None if math.isfinite(value) else "must be a finite number"
        case dict():
            return next(filter(None, map(_key_complaint, value)), None)
        case list() | tuple():
            return None
        case _:
            return f"a {type(value).__name__} cannot be used here: put it in quotes"


def _key_complaint(key: object) -> str | None:
    if not isinstance(key, str):
        return f"the key {key!r:.80} is not text: put it in quotes"
    return _text_complaint(key)


def _text_complaint(text: str) -> str | None:
    return "has a NUL character or half of a character" if _UNSTORABLE.search(text) else None
