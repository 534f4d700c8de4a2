"""The answer in a completion: what an extracting reward compares.

Each function takes linear time, so that no completion can make it slow. A user's regex cannot be
trusted with that; it runs under the scorer's time limit.
"""

import re
from collections.abc import Callable, Mapping

from offbeat.contracts.run_spec import AnswerExtraction, ExtractingReward

TAG_DEFAULT = "answer"

# A sign counts where no number or word ends before it: `8-5` is 8 and 5. A comma counts between
# groups of three digits; a point only before a digit, so that `3.` at the end of a sentence is 3.
_NUMBER = re.compile(r"(?:(?<![\w).])[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


def extract(part: ExtractingReward, completion: str) -> str | None:
    """The answer as the part's `extract` finds it; None where there is none."""
    return EXTRACTIONS[part.extract](completion, part.pattern)


def canonical(part: ExtractingReward, expected: str) -> str:
    """The expected answer in the form in which `extract` gives answers."""
    expected = expected.strip()
    if part.extract == "last_number" and _NUMBER.fullmatch(expected):
        return canonical_number(expected)
    return expected


def canonical_number(number: str) -> str:
    """`+07` -> `7`, `1,234.50` -> `1234.5`, `-0` -> `0`."""
    whole, _, fraction = number.lstrip("+-−").replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    digits = (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else "")
    return f"-{digits}" if number[0] in "-−" and digits != "0" else digits


def _last_number(completion: str, _pattern: str | None) -> str | None:
    numbers = _NUMBER.findall(completion)
    return canonical_number(numbers[-1]) if numbers else None


def _last_line(completion: str, _pattern: str | None) -> str | None:
    lines = completion.strip().splitlines()
    return lines[-1].strip() if lines else None


def _tag(completion: str, pattern: str | None) -> str | None:
    """The inside of the last `<tag>...</tag>`."""
    tag = pattern or TAG_DEFAULT
    before, end, _ = completion.rpartition(f"</{tag}>")
    _, start, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if start and end else None


def _regex(completion: str, pattern: str | None) -> str | None:
    """Group 1 of the last match."""
    matches = list(re.finditer(pattern or "", completion))
    answer = matches[-1].group(1) if matches else None
    return None if answer is None else answer.strip()


def _whole(completion: str, _pattern: str | None) -> str | None:
    return completion.strip()


EXTRACTIONS: Mapping[AnswerExtraction, Callable[[str, str | None], str | None]] = {
    "last_number": _last_number,
    "last_line": _last_line,
    "tag": _tag,
    "regex": _regex,
    "none": _whole,
}
