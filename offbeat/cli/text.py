"""Values as short text: durations, numbers, trends, and other people's text made harmless."""

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

NONE = "–"
SPARK_WIDTH = 24
_SPARKS = "▁▂▃▄▅▆▇█"
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing: escapes, and marks that reorder the line."""


def duration(seconds: float | None) -> str:
    """`45s`, `3m10s`, `2h05m`, `4d03h`: the two largest units."""
    if seconds is None:
        return NONE
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{m}m{s:02d}s" if m else f"{s}s"


def number(value: float | None) -> str:
    """Four significant digits, with a dash for none."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def reward(value: float | None) -> str:
    """Two decimals, with a dash for none."""
    return NONE if value is None else f"{value:.2f}"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The trend in at most `width` bars, each the mean of its share of the values."""
    bars = min(width, len(values))
    edges = [round(bar * len(values) / bars) for bar in range(bars + 1)] if bars else []
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(_SPARKS) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)


def clock(at: datetime) -> str:
    """The time of day, here."""
    return f"{at.astimezone():%H:%M:%S}"


def moment(at: datetime | None) -> str:
    """The date and the time of day, here."""
    return NONE if at is None else f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def safe(text: str) -> str:
    """Text from models, data and workers without what would steer the terminal."""
    return _UNSAFE.sub("�", text)


def shorten(text: str, chars_max: int) -> str:
    """The beginning of a text, marked where it was cut."""
    return text if len(text) <= chars_max else text[: chars_max - 1].rstrip() + "…"
