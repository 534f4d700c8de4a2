"""The embedded parts start, answer and end."""

import subprocess
from pathlib import Path

import pytest
import redis

from offbeat.errors import UnavailableError
from scripts import parts


def test_valkey_answers(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set("key", "value")
        assert client.get("key") == b"value"


def test_the_answer_of_another_program_is_not_taken_for_the_part_s_own(
    valkey_url: str, tmp_path: Path
) -> None:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    part = parts.valkey(port, tmp_path)
    assert part.is_ready()
    process = subprocess.Popen(part.command, stdout=subprocess.DEVNULL)
    with pytest.raises(UnavailableError, match="valkey exited before it was ready"):
        parts.wait_until_ready(part, process)
