"""The kinds of reward: how each one scores, what it needs, and what can be wrong with it.

These run in the scorer's child process; only `missing_column` is for everybody.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from offbeat.contracts.run_spec import (
    ExtractingReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardSection,
)
from offbeat.data.gym_entry import ENTRY_COLUMN
from offbeat.errors import InvalidRequestError
from offbeat.rewards.exact_match import score_exact_match
from offbeat.rewards.gym import score_gym
from offbeat.rewards.python_function import load_function, score_python
from offbeat.rewards.regex import score_regex


@dataclass(frozen=True, kw_only=True)
class RewardKind:
    """Functions of one kind of reward."""

    score: Callable[..., object]
    """`(part, samples)` -> one score a sample, not yet checked."""
    load: Callable[..., None]
    """`(part)`: imports and compiles what `score` uses; raises where something is wrong."""


def missing_column(part: RewardSection, columns: Mapping[str, JsonValue]) -> str | None:
    """What a row lacks for this part to score it, in words; None where it lacks nothing."""
    if part.type == "reasoning_gym" and ENTRY_COLUMN not in columns:
        return 'no entry of reasoning-gym: give the data the source "reasoning_gym"'
    if part.type != "exact_match":
        return None
    if part.field not in columns:
        known = ", ".join(map(repr, columns)) or "only the prompt"
        return f"no column {part.field!r} (it has {known}): set the reward's `field`"
    if not isinstance(columns[part.field], str | int | float):
        return f"no text or number in {part.field!r}: mend or drop the row"
    return None


def _load_gym(part: ReasoningGymReward) -> None:
    import reasoning_gym  # noqa: F401 - a second that the time limit of a score should not pay

    _compile_extraction(part)


def _load_regex(part: RegexReward) -> None:
    _compile(part.pattern)


def _load_python(part: PythonReward) -> None:
    load_function(part.path)


def _compile_extraction(part: ExtractingReward) -> None:
    if part.extract == "regex" and _compile(part.pattern or "").groups < 1:
        raise InvalidRequestError(
            f"the pattern {part.pattern!r} has no group: put the answer in parentheses"
        )


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(
            f"the pattern {pattern!r} is not a regular expression: {error}"
        ) from error


KINDS: Mapping[str, RewardKind] = {
    "reasoning_gym": RewardKind(score=score_gym, load=_load_gym),
    "exact_match": RewardKind(score=score_exact_match, load=_compile_extraction),
    "regex": RewardKind(score=score_regex, load=_load_regex),
    "python": RewardKind(score=score_python, load=_load_python),
}
