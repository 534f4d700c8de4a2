"""Finding the answer in a completion."""

import pytest

from offbeat.contracts.run_spec import AnswerExtraction, ExactMatchReward
from offbeat.rewards.extraction import canonical, extract


def part(how: AnswerExtraction, pattern: str | None = None) -> ExactMatchReward:
    return ExactMatchReward(type="exact_match", extract=how, pattern=pattern)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2 + 2 = 4", "4"),
        ("The result is -3.", "-3"),
        ("x=−3", "-3"),
        ("It is +5", "5"),
        ("8-5", "5"),
        ("f(2)-5", "5"),
        ("8 - 5 = 3", "3"),
        ("about 3.50 in all", "3.5"),
        ("3.0", "3"),
        ("1,234", "1234"),
        ("1,234,567.80!", "1234567.8"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("007", "7"),
        ("-0.0", "0"),
        (r"\boxed{42}", "42"),
        ("9" * 5000, "9" * 5000),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(completion: str, answer: str | None) -> None:
    assert extract(part("last_number"), completion) == answer


@pytest.mark.parametrize(
    ("expected", "form"),
    [("07", "7"), (" 1,234 ", "1234"), ("-2.50", "-2.5"), ("seven", "seven"), ("3 or 4", "3 or 4")],
)
def test_the_expected_number_takes_the_same_form(expected: str, form: str) -> None:
    assert canonical(part("last_number"), expected) == form
    assert canonical(part("last_line"), expected) == expected.strip()


@pytest.mark.parametrize(
    ("how", "pattern", "completion", "answer"),
    [
        ("last_line", None, "first\n last \n\n", "last"),
        ("last_line", None, " \n", None),
        ("tag", None, "<answer>1</answer> <answer> 2\n3 </answer>", "2\n3"),
        ("tag", "final", "<final>7</final> <answer>8</answer>", "7"),
        ("tag", None, "<answer>7", None),
        ("tag", None, "7</answer>", None),
        ("regex", r"#### (\S+)", "#### 1\nno: #### 2", "2"),
        ("regex", r"(a)?b", "b", None),
        ("regex", r"#### (\S+)", "1", None),
        ("none", None, " whole \n", "whole"),
    ],
)
def test_the_other_ways(
    how: AnswerExtraction, pattern: str | None, completion: str, answer: str | None
) -> None:
    assert extract(part(how, pattern), completion) == answer
