"""The specs of runs as they are read again and again: parsed once, as long as they are small."""

from functools import lru_cache

from offbeat.contracts.run_spec import RunSpec

SPECS_REMEMBERED = 512
"""Those of all runs that go on at once on a large installation."""
REMEMBERED_CHARS_MAX = 64 * 2**10
"""A longer one, with rows of data in it, is parsed each time: 512 of them would be gigabytes."""


def parsed_spec(body: str) -> RunSpec:
    """The spec of a run, as `runs.spec` has it."""
    return _remembered(body) if len(body) <= REMEMBERED_CHARS_MAX else _parse(body)


def _parse(body: str) -> RunSpec:
    return RunSpec.model_validate_json(body)


_remembered = lru_cache(maxsize=SPECS_REMEMBERED)(_parse)
