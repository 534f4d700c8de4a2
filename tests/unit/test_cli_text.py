from datetime import UTC, datetime

import pytest

from offbeat.cli import text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (-3.0, "0s"),
        (0.4, "0s"),
        (59.6, "1m00s"),
        (190.0, "3m10s"),
        (7500.0, "2h05m"),
        (356_400.0, "4d03h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_numbers_have_four_digits() -> None:
    values = (None, 0.0, 0.000123456, -1.23456, 9999.0, 1_234_567.0)
    assert [text.number(value) for value in values] == [
        "–",
        "0",
        "0.0001235",
        "-1.235",
        "9999",
        "1,234,567",
    ]
    assert (text.reward(None), text.reward(0.526)) == ("–", "0.53")


def test_a_trend_has_a_bar_for_each_value_or_for_a_share_of_them() -> None:
    assert text.sparkline([]) == ""
    assert text.sparkline([0.3]) == "▁"
    assert text.sparkline([2.0, 2.0]) == "▁▁"
    assert text.sparkline([0.0, 1.0, 7.0]) == "▁▂█"
    assert text.sparkline([0.0, 2.0, 6.0, 8.0, 13.0, 15.0], width=3) == "▁▄█"
    assert len(text.sparkline(range(1000))) == 24


def test_times_are_those_of_this_place() -> None:
    at = datetime(2026, 11, 30, 12, 3, 4, tzinfo=UTC)
    assert text.clock(at) == at.astimezone().strftime("%H:%M:%S")
    assert text.moment(at) == at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    assert text.moment(None) == "–"


def test_what_would_steer_a_terminal_is_replaced() -> None:
    assert text.safe("a\x1b[31mb\rc\x9bd\u202ee\ud800") == "a�[31mb�c�d�e�"
    assert text.safe("tab\tline\nΩ 👩‍👧 ñ") == "tab\tline\nΩ 👩‍👧 ñ"


def test_long_text_is_cut_with_a_mark() -> None:
    assert text.shorten("abcdef", 6) == "abcdef"
    assert text.shorten("abc defg", 5) == "abc…"
