"""What a log never holds."""

import subprocess
import sys

import pytest

PROGRAM = """
import structlog
from offbeat.logs import configure_logs
from offbeat.settings import LogSettings

configure_logs(LogSettings(log_level="DEBUG"), "test")

def work(key):
    raise OSError("no disk left")

try:
    work("hunter2")
except OSError as error:
    structlog.get_logger().error("It failed.", exc_info=error)
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_has_no_values_of_variables(log_format: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"OFFBEAT_LOG_FORMAT": log_format, "PYTHONPATH": "."},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "OSError: no disk left" in ended.stderr
    assert ended.stderr.count("hunter2") == 0
