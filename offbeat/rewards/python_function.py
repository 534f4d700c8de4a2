"""A user's own function, called as TRL calls its reward functions."""

import importlib
import inspect
from collections.abc import Callable, Sequence

from pydantic import JsonValue

from offbeat.contracts.run_spec import PythonReward
from offbeat.errors import InvalidRequestError
from offbeat.rewards.scores import RewardSample

RewardFunction = Callable[..., object]


def score_python(part: PythonReward, samples: Sequence[RewardSample]) -> object:
    """What `f(prompts=..., completions=..., completion_ids=..., **columns)` returns, unchecked.

    Every argument is a list with one entry a sample; a column that a row lacks is None there. Where
    a prompt is a conversation, its completion is one too: a list of one assistant message.
    """
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    columns = {
        name: [sample.columns.get(name) for sample in samples] for name in names if name != "prompt"
    }
    # A column of the same name gives way: a function is promised these three.
    arguments = columns | {
        "prompts": [sample.columns["prompt"] for sample in samples],
        "completions": [_completion(sample) for sample in samples],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
    }
    return load_function(part.path)(**arguments)


def load_function(path: str) -> RewardFunction:
    """The function that `package.module:function` names, or `InvalidRequestError`."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"cannot import {module_name!r} on this generator ({error}): install it there, or put "
            "it in the folder in which the generator is started"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidRequestError(
            f"{module_name!r} has no function {name!r}: check the path {path!r}"
        )
    if inspect.iscoroutinefunction(function):
        raise InvalidRequestError(f"{path!r} is asynchronous: name a plain function")
    return function


def _completion(sample: RewardSample) -> JsonValue:
    if isinstance(sample.columns["prompt"], str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]
