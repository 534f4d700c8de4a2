"""What each kind of reward scores, and what becomes of a wrong return value."""

import math
from typing import NoReturn

import numpy as np
import pytest
from pydantic import JsonValue

from offbeat.contracts.run_spec import (
    ExactMatchReward,
    PythonReward,
    ReasoningGymReward,
    RegexReward,
    RewardSection,
)
from offbeat.data.gym_entry import GymEntry
from offbeat.rewards.child import checked_scores, describe, load_part, score_part
from offbeat.rewards.registry import missing_column
from offbeat.rewards.scores import PartScores, RewardSample

Conversation = list[dict[str, str]]
CALLS: list[dict[str, list[object]]] = []
"""What `record` was called with."""


def sample(completion: str, **columns: JsonValue) -> RewardSample:
    return RewardSample(
        completion=completion, completion_ids=(1, 2), columns={"prompt": "p", **columns}
    )


def record(**arguments: list[object]) -> list[float]:
    CALLS.append(arguments)
    return [0.5] * len(arguments["completions"])


async def later(**_: list[object]) -> list[float]:
    return []


def python(function: str) -> PythonReward:
    return PythonReward(type="python", path=f"{__name__}:{function}")


def test_exact_match_compares_in_the_form_of_the_extraction() -> None:
    part = ExactMatchReward(type="exact_match", extract="last_number")
    samples = [
        sample("It is 7.", answer="07"),
        sample("1,234", answer=1234),
        sample("3", answer=3.0),
        sample("8", answer="7"),
        sample("none", answer="7"),
    ]
    assert score_part(part, samples) == PartScores(values=(1.0, 1.0, 1.0, 0.0, 0.0))


def test_exact_match_of_text_keeps_case_unless_told() -> None:
    samples = [sample(" Paris ", city="paris"), sample("true", city=True)]
    strict = ExactMatchReward(type="exact_match", field="city")
    assert score_part(strict, samples).values == (0.0, 1.0)
    loose = ExactMatchReward(type="exact_match", field="city", ignore_case=True)
    assert score_part(loose, samples).values == (1.0, 1.0)


def test_regex_is_found_anywhere_or_matches_all() -> None:
    samples = [sample("a1b"), sample("1"), sample("x")]
    assert score_part(RegexReward(type="regex", pattern=r"\d"), samples).values == (1.0, 1.0, 0.0)
    whole = RegexReward(type="regex", pattern=r"\d", full_match=True)
    assert score_part(whole, samples).values == (0.0, 1.0, 0.0)


def test_reasoning_gym_scores_the_extracted_answer_with_the_right_task() -> None:
    def entry(task: str, answer: str) -> str:
        made = {"question": "?", "answer": answer, "metadata": {"source_dataset": task}}
        return GymEntry(task=task, config={}, entry=made).to_literal()

    part = ReasoningGymReward(type="reasoning_gym", extract="last_number")
    samples = [
        sample("4 + 3 = 7", entry=entry("chain_sum", "7")),
        sample("It is 17", entry=entry("chain_sum", "7")),
        sample("no idea", entry=entry("gcd", "7")),
    ]
    assert score_part(part, samples) == PartScores(values=(1.0, 0.5, 0.0))


def test_a_grader_that_raises_over_one_answer_costs_that_sample_only() -> None:
    made = {"question": "?", "answer": None, "metadata": {"initial_state": {}}}
    literal = GymEntry(task="boxnet", config={}, entry=made).to_literal()
    part = ReasoningGymReward(type="reasoning_gym")
    scores = score_part(part, [sample("no json", entry=literal), sample("7", entry=literal)])
    assert scores.values == (0.0, None)
    assert scores.problem is not None
    assert scores.problem.startswith(
        "1 of 2 samples not scored; sample 1: TypeError: 'int' object is not iterable (boxnet.py:"
    )


def test_a_python_function_is_called_as_trl_calls_it() -> None:
    CALLS.clear()
    chat: list[JsonValue] = [{"role": "user", "content": "q"}]
    samples = [sample("one", answer="1"), sample("two", level=2, prompt=chat)]
    samples[1] = RewardSample(
        completion="two", completion_ids=(3,), columns={"prompt": chat, "level": 2}
    )
    assert score_part(python("record"), samples) == PartScores(values=(0.5, 0.5))
    assert [
        {
            "prompts": ["p", chat],
            "completions": ["one", [{"role": "assistant", "content": "two"}]],
            "completion_ids": [[1, 2], [3]],
            "answer": ["1", None],
            "level": [None, 2],
        }
    ] == CALLS


def test_numbers_of_any_kind_are_scores_and_none_is_no_score() -> None:
    scores = checked_scores([True, 2, 0.5, np.float32(0.25), None], 5)
    assert scores == PartScores(values=(1.0, 2.0, 0.5, 0.25, None))
    assert checked_scores(np.array([1.0, 2.0]), 2) == PartScores(values=(1.0, 2.0))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "nan is not finite: return None for no score"),
        (-math.inf, "-inf is not finite: return None for no score"),
        ("1.0", "str is not a number: return floats or None"),
        (10**400, "the number is too large for a float"),
    ],
)
def test_a_wrong_value_loses_its_sample(value: object, reason: str) -> None:
    assert checked_scores([1.0, value, 0.0], 3) == PartScores(
        values=(1.0, None, 0.0), problem=f"1 of 3 samples not scored; sample 1: {reason}"
    )


def test_a_wrong_length_or_no_list_loses_all() -> None:
    lost = (None, None)
    assert checked_scores([1.0], 2) == PartScores(
        values=lost, problem="returned 1 scores for 2 samples"
    )
    assert checked_scores(None, 2) == PartScores(
        values=lost, problem="returned NoneType, not a list"
    )
    assert checked_scores(0.5, 2).problem == "returned float, not a list"


def test_an_error_is_described_even_where_it_cannot_describe_itself() -> None:
    class MuteError(Exception):
        def __str__(self) -> NoReturn:
            raise RuntimeError

    assert describe(MuteError()).endswith("MuteError: <exception str() failed>")


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (PythonReward(type="python", path="no.such:fn"), "cannot import 'no.such' on this"),
        (python("nothing"), "has no function 'nothing': check the path"),
        (python("CALLS"), "has no function 'CALLS'"),
        (python("later"), "is asynchronous: name a plain function"),
        (RegexReward(type="regex", pattern="("), "the pattern '(' is not a regular expression"),
        (
            ExactMatchReward(type="exact_match", extract="regex", pattern="a"),
            "the pattern 'a' has no group: put the answer in parentheses",
        ),
    ],
)
def test_a_part_that_cannot_work_is_found_out(part: RewardSection, problem: str) -> None:
    found = load_part(part)
    assert found is not None
    assert problem in found


def test_a_part_that_can_work_loads() -> None:
    assert load_part(python("record")) is None
    assert load_part(ReasoningGymReward(type="reasoning_gym", extract="last_number")) is None


def test_what_a_row_lacks_for_a_part_is_named() -> None:
    gym = ReasoningGymReward(type="reasoning_gym")
    exact = ExactMatchReward(type="exact_match")
    assert missing_column(gym, {"entry": "..."}) is None
    assert missing_column(gym, {"answer": "7"}) == (
        'no entry of reasoning-gym: give the data the source "reasoning_gym"'
    )
    assert missing_column(exact, {"answer": 7}) is None
    assert missing_column(exact, {"solution": "7"}) == (
        "no column 'answer' (it has 'solution'): set the reward's `field`"
    )
    assert missing_column(exact, {"answer": None}) == (
        "no text or number in 'answer': mend or drop the row"
    )
    assert missing_column(python("record"), {}) is None
