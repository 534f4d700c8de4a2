"""What is wrong with a spec, in words a person can act on: pydantic's mistakes, reworded.

A location names the user's own keys (`rewards[0].weight`): pydantic's union tags are left out. An
unknown key comes with the nearest known one. Input is echoed only where it helps, cut to
`ECHO_CHARS_MAX`, and never below a key that looks like a secret.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offbeat.contracts.base import Contract
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import ProblemField

ECHO_CHARS_MAX = 80
PROBLEMS_MAX = 50
"""Nobody reads more before mending what is told first."""
MISTAKES_MAX = 4 * PROBLEMS_MAX
"""Mistakes looked at: some merge into one problem, and naming the nearest key takes time."""
ALIKE_MIN = 0.7
"""Share of letters in common, by difflib: `colour` is not meant to be `rollout` (0.62)."""

Path = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[\w-]{1,80}")
SECRET_KEY = re.compile(
    r"secret|passw|credential|auth|(api|access|private)_?key|(^|_)token$", re.IGNORECASE
)
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
}
_MESSAGES = {
    "missing": "missing; it has no default",
    "too_short": "must not be empty",
    "too_long": "may have at most {max_length} entries, not {actual_length}",
    "string_too_short": "must not be empty",
    "string_too_long": "may have at most {max_length} characters",
    "value_error": "{error}",
}
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}
_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,63}$": (
        'a name: 1 to 64 letters, digits, spaces, ".", "_" or "-", the first a letter or digit'
    ),
    r"^[a-z0-9][a-z0-9-]{0,31}$": (
        'a pool: 1 to 32 small letters, digits or "-", the first a letter or digit'
    ),
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "a function: write package.module:function",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, or None where none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=ALIKE_MIN)), None)


def problem_lines(fields: tuple[ProblemField, ...]) -> list[str]:
    """`section.field: what is wrong`, one a problem; what concerns the whole has no field."""
    return [f"{item.field}: {item.message}" if item.field else item.message for item in fields]


def show_path(path: Path) -> str:
    """`("rewards", 0, "weight")` -> `rewards[0].weight`; odd keys are quoted."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_show_key(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def explain(error: ValidationError) -> tuple[ProblemField, ...]:
    """Every mistake of a spec, one line each, in the order of the sections."""
    by_path: dict[Path, list[_Mistake]] = {}
    for item in error.errors(include_url=False)[:MISTAKES_MAX]:
        mistake = _mistake(item)
        by_path.setdefault(mistake.path, []).append(mistake)
    # A mistake inside a list or a section comes with others on the whole (it is then "too short",
    # or does not fit the other branch of a union), which only repeat it.
    containers = {path[:end] for path in by_path for end in range(len(path))}
    problems = [
        ProblemField(field=show_path(path), message=_merge(mistakes))
        for path, mistakes in by_path.items()
        if path not in containers
    ]
    if len(problems) <= PROBLEMS_MAX:
        return tuple(problems)
    return (*problems[:PROBLEMS_MAX], ProblemField(field="", message="and more"))


@dataclass(frozen=True, kw_only=True)
class _Mistake:
    """One mistake. `expected` instead of a message: the type is wrong, another branch may fit."""

    path: Path
    value: object
    expected: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where pydantic's location leads: the user's path, its section, and what may stand there."""

    path: Path
    section: type[Contract]
    choices: tuple[type[Contract], ...]


def _merge(mistakes: list[_Mistake]) -> str:
    """One line for a place. A union makes a mistake a branch: what got past the type tells more."""
    for mistake in mistakes:
        if mistake.message:
            return mistake.message
    expected = " or ".join(mistake.expected for mistake in mistakes)
    return f"must be {expected}{_not(mistakes[0].path, mistakes[0].value)}"


def _mistake(item: ErrorDetails) -> _Mistake:
    place, kind, value = _locate(item["loc"]), item["type"], item["input"]
    context = item.get("ctx", {})
    if kind in _EXPECTED:
        return _Mistake(path=place.path, value=value, expected=_EXPECTED[kind])
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        if len(options) == 1:
            return _Mistake(path=place.path, value=value, expected=f'"{options[0]}"')
        message = _not_among(place.path, value, options)
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(place, context["discriminator"].strip("'"), value)
    elif kind == "extra_forbidden":
        message = _unknown_key(str(place.path[-1]), place.section)
    elif kind in _BOUNDS:
        message = f"must be {_BOUNDS[kind].format(**context)}{_not(place.path, value)}"
    elif kind == "string_pattern_mismatch":
        message = f"{_subject(place.path, value)} is not {_form(context['pattern'])}"
    elif kind in _MESSAGES:
        message = _MESSAGES[kind].format(**context)
    else:
        message = item["msg"]
    return _Mistake(path=place.path, value=value, message=message)


def _locate(location: Sequence[str | int]) -> _Place:
    """Walk the contracts along pydantic's location, which names union members as if they were
    keys."""
    path: list[str | int] = []
    section: type[Contract] = RunSpec
    choices: tuple[type[Contract], ...] = (RunSpec,)
    has_free_keys = False
    for part in location:
        if isinstance(part, int):
            path.append(part)
        elif len(choices) > 1:
            choices = tuple(choice for choice in choices if _tag(choice) == part)
        elif choices:
            path.append(part)
            section = choices[0]
            field = section.model_fields.get(part)
            choices = _sections(field.annotation) if field else ()
            has_free_keys = field is not None and get_origin(field.annotation) is dict
        elif has_free_keys and part != "[key]":
            path.append(part)
    return _Place(path=tuple(path), section=section, choices=choices)


def _sections(annotation: object) -> tuple[type[Contract], ...]:
    """The sections that a value of this type may be."""
    if isinstance(annotation, type) and issubclass(annotation, Contract):
        return (annotation,)
    return tuple(found for inner in get_args(annotation) for found in _sections(inner))


def _tag(section: type[Contract]) -> str:
    """What tells this member of a union: its one required literal."""
    literals = (
        get_args(field.annotation)[0]
        for field in section.model_fields.values()
        if field.is_required() and get_origin(field.annotation) is Literal
    )
    return next(literals, "")


def _wrong_tag(place: _Place, key: str, value: Mapping[str, object]) -> _Mistake:
    """`data.source` or `rewards[].type` is missing or unknown."""
    path = (*place.path, key)
    options = [_tag(choice) for choice in place.choices]
    if key not in value:
        return _Mistake(path=path, value=value, message=f"missing; one of {', '.join(options)}")
    return _Mistake(path=path, value=value, message=_not_among(path, value[key], options))


def _not_among(path: Path, value: object, options: Sequence[str]) -> str:
    near = nearest(value, options) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    return f"{_subject(path, value)} is not one of {', '.join(options)}{hint}"


def _unknown_key(key: str, section: type[Contract]) -> str:
    near = nearest(key, section.model_fields)
    if near:
        return f"unknown key; did you mean {near}?"
    sections = {name: _sections(field.annotation) for name, field in RunSpec.model_fields.items()}
    homes = [
        name
        for name, choices in sections.items()
        if section not in choices and any(key in choice.model_fields for choice in choices)
    ]
    if homes:
        return f"unknown key; it belongs in {' or '.join(homes)}"
    return f"unknown key; known here: {', '.join(section.model_fields)}"


def _form(pattern: str) -> str:
    return _PATTERNS.get(pattern, f"of the form {pattern}")


def _not(path: Path, value: object) -> str:
    return "" if _is_secret(path) else f", not {_show(value)}"


def _subject(path: Path, value: object) -> str:
    return "it" if _is_secret(path) else _show(value)


def _is_secret(path: Path) -> bool:
    return any(isinstance(part, str) and SECRET_KEY.search(part) for part in path)


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if not isinstance(value, str):
        return _cut(json.dumps(value))
    text = value[:ECHO_CHARS_MAX]
    return _cut(json.dumps(text, ensure_ascii=not text.isprintable()))


def _show_key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else _show(key)


def _cut(text: str) -> str:
    return text if len(text) <= ECHO_CHARS_MAX else text[: ECHO_CHARS_MAX - 1] + "…"
