"""The scorer's child process: what it does when it starts and what it can be asked.

It imports no torch. Nothing but plain values leaves it: an exception or a number of a user's own
class would be rebuilt, and its module imported, in the generator.
"""

import faulthandler
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from numbers import Real
from typing import ParamSpec, TypeVar

from offbeat.contracts.run_spec import RewardSection
from offbeat.errors import InvalidRequestError
from offbeat.rewards.registry import KINDS
from offbeat.rewards.scores import PartScores, RewardSample

PROBLEM_CHARS_MAX = 1000
"""Of one reason: it travels in an event."""
MEMORY_BYTES_MAX = 8 * 2**30
"""Some graders evaluate an answer as code: `"a" * 10**11` must not cost the machine its memory."""
WATCHDOG_GRACE_S = 30.0
"""After the limit, in which the generator ends a late child; past it, there is no generator."""

P = ParamSpec("P")
T = TypeVar("T")


def start() -> None:
    """Print nothing, take a bounded amount of memory, and end at once on SIGTERM, also inside a
    regex, where no handler would run."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_limit == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, hard_limit))


def run(limit_s: float, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do the task; an orphan that hangs ends itself, from a thread that needs no interpreter."""
    faulthandler.dump_traceback_later(limit_s + WATCHDOG_GRACE_S, exit=True)
    try:
        return task(*args, **kwargs)
    finally:
        faulthandler.cancel_dump_traceback_later()


def load_part(part: RewardSection) -> str | None:
    """Import and compile what the part needs; what is wrong with it, or None."""
    try:
        KINDS[part.type].load(part)
    except InvalidRequestError as error:
        return error.detail
    except BaseException as error:  # noqa: BLE001 - whatever a user's module raises is the answer
        return describe(error)
    return None


def score_part(part: RewardSection, samples: Sequence[RewardSample]) -> PartScores:
    """The part's scores; samples that it could not score are None."""
    try:
        scores = KINDS[part.type].score(part, samples)
        return checked_scores(scores, len(samples))
    except BaseException as error:  # noqa: BLE001 - whatever a user's function raises is the answer
        return unscored(len(samples), describe(error))


def unscored(num_samples: int, problem: str) -> PartScores:
    """No score for any sample."""
    return PartScores(values=(None,) * num_samples, problem=problem[:PROBLEM_CHARS_MAX])


def checked_scores(scores: object, num_samples: int) -> PartScores:
    """What a reward returned, as floats: a wrong value loses its sample, a wrong length all."""
    if not isinstance(scores, Iterable):
        return unscored(num_samples, f"returned {type(scores).__name__}, not a list")
    listed = list(scores)
    if len(listed) != num_samples:
        return unscored(num_samples, f"returned {len(listed)} scores for {num_samples} samples")
    problems = [_problem(score) for score in listed]
    found = [f"sample {index}: {text}" for index, text in enumerate(problems) if text]
    summary = f"{len(found)} of {num_samples} samples not scored; {found[0]}" if found else None
    return PartScores(
        values=tuple(
            None if problem is not None or score is None else float(score)
            for score, problem in zip(listed, problems, strict=True)
        ),
        problem=summary and summary[:PROBLEM_CHARS_MAX],
    )


def describe(error: BaseException) -> str:
    """Type, message and line, also where the error's own text cannot be made."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{traceback.format_exception_only(error)[-1].strip()}{where}"


def _problem(score: object) -> str | None:
    if isinstance(score, BaseException):
        return describe(score)
    if score is None:
        return None
    if not isinstance(score, Real):
        return f"{type(score).__name__} is not a number: return floats or None"
    try:
        return None if isfinite(score) else f"{score} is not finite: return None for no score"
    except OverflowError:
        return "the number is too large for a float"
