"""What `POST /v1/runs` refuses, and that it needs no torch for it."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter

from offbeat.contracts.data_sources import DataSection
from offbeat.data.checks import check_spec_data
from offbeat.errors import InvalidDataError

SECTION: TypeAdapter[DataSection] = TypeAdapter(DataSection)


def test_a_section_that_may_be_right_passes() -> None:
    for section in (
        {"source": "reasoning_gym", "tasks": [{"name": "chain_sum", "config": {"max_terms": 3}}]},
        {"source": "inline", "rows": [{"prompt": "a"}]},
        {"source": "jsonl", "uri": "/nowhere"},
    ):
        check_spec_data(SECTION.validate_python(section))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"source": "reasoning_gym", "tasks": [{"name": "letter_count"}]}, "'letter_counting'"),
        ({"source": "inline", "rows": [{"prompt": "a"}, {"question": "b"}]}, "row 1: no column"),
    ],
)
def test_a_section_that_is_wrong_is_refused(section: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        check_spec_data(SECTION.validate_python(section))


def test_the_check_loads_no_torch() -> None:
    script = (
        "import sys; from offbeat.data.checks import check_spec_data; "
        "from offbeat.contracts.data_sources import ReasoningGymData; "
        "check_spec_data(ReasoningGymData(source='reasoning_gym', tasks=[{'name': 'gcd'}])); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert shown.stdout == b"set()\n"
