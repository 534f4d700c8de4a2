"""Hostile specs, over REST and in files for the command line: refused in words that help, without
an effect on anything else."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.cli.session import ExitCode
from tests.service_process import JSON, ServiceProcess
from tests.specs import spec_dict

ANSWER_BYTES_MAX = 16 * 2**10
LOGGED_CHARS_MAX = 500
NOT_FINITE = "train.learning_rate: must be a finite number"
LARGE_NUMBER = "train.learning_rate: the number is too large"
UNSTORABLE = "has a NUL character or half of a character"
NAME = (
    'is not a name: 1 to 64 letters, digits, spaces, ".", "_" or "-", the first a letter or digit'
)


def spec_with(**changes: Any) -> bytes:
    return json.dumps(spec_dict(**changes)).encode()


def with_rate(literal: bytes) -> bytes:
    """A spec with this literal as its learning rate."""
    return spec_with(train={"learning_rate": "HERE"}).replace(b'"HERE"', literal)


HOSTILE_BODIES = {
    "1e400": (with_rate(b"1e400"), NOT_FINITE),
    "NaN": (with_rate(b"NaN"), NOT_FINITE),
    "Infinity": (with_rate(b"-Infinity"), NOT_FINITE),
    "30 digits": (with_rate(b"9" * 30), LARGE_NUMBER),
    "a million digits": (with_rate(b"9" * 1_000_000), LARGE_NUMBER),
    "a key twice": (
        b'{"name": "a", "name": "b"}',
        "the body is not valid JSON: the key 'name' is given twice",
    ),
    "half a character": (spec_with(name="a\ud800b"), f"name: {UNSTORABLE}"),
    "NUL": (spec_with(tags={"a\0": "b"}), f"tags: {UNSTORABLE}"),
    "right to left": (spec_with(name="a\u202egpj.exe"), f'name: "a\\u202egpj.exe" {NAME}'),
    "a name of 1 MB": (spec_with(name="x" * 2**20), f'name: "{"x" * 78}… {NAME}'),
    "a text of 1 MB": (
        spec_with(data={"system_prompt": "x" * 2**20}),
        "data.system_prompt: may have at most 65536 characters",
    ),
    "millions of values": (
        b'{"a": [' + b"[]," * 2_000_000 + b"[]]}",
        "the body has more than 100,000 values: put the data in a file of its own",
    ),
    "UTF-16": (spec_with().decode().encode("utf-16"), "the body is not UTF-8 at byte 0"),
    "zeros": (bytes(1000), "the body is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    "10,000 levels": (
        spec_with(tags={"x": "HERE"}).replace(b'"HERE"', b"[" * 10_000 + b"]" * 10_000),
        "the body is nested more than 64 levels deep",
    ),
    "65 levels": (
        spec_with(tags={"x": "HERE"}).replace(b'"HERE"', b"[" * 65 + b"]" * 65),
        f"tags.x{'[0]' * 63}: nested more than 64 levels deep",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_BODIES)
def test_a_hostile_spec_is_refused_over_rest(
    orchestrator_process: ServiceProcess, case: str
) -> None:
    body, detail = HOSTILE_BODIES[case]
    before = len(orchestrator_process.refusals())
    response = orchestrator_process.http.post("/v1/runs", content=body, headers=JSON)
    assert (response.status_code, response.json()["detail"]) == (422, detail)
    assert response.headers["content-type"] == "application/problem+json"
    assert len(response.content) <= ANSWER_BYTES_MAX
    assert orchestrator_process.refusals()[before:] == [detail[:LOGGED_CHARS_MAX]]
    orchestrator_process.check_is_up()


TOML = """
model = {{id = "tiny"}}
rewards = [{{type = "exact_match"}}]
[data]
source = "jsonl"
uri = "x"
[train]
steps = 2
learning_rate = {rate}
[tags]
x = {tag}
"""


def toml(rate: str = "0.1", tag: str = '"y"') -> bytes:
    return TOML.format(rate=rate, tag=tag).encode()


HOSTILE_FILES = {
    "1e400": (toml("1e400"), NOT_FINITE),
    "nan": (toml("nan"), NOT_FINITE),
    "-inf": (toml("-inf"), NOT_FINITE),
    "30 digits": (toml("9" * 30), LARGE_NUMBER),
    "a key twice": (
        toml() + b'x = "z"',
        "not valid TOML: Cannot overwrite a value (at end of document)",
    ),
    "half a character": (
        toml(tag='"\\ud800"'),
        "not valid TOML: Escaped character is not a Unicode scalar value (at line 11, column 12)",
    ),
    "an escaped NUL": (toml(tag='"\\u0000"'), f"tags.x: {UNSTORABLE}"),
    "a NUL": (toml(tag='"\0"'), "not valid TOML: Illegal character '\\x00' (at line 11, column 6)"),
    "right to left": (b'name = "a\xe2\x80\xaegpj.exe"' + toml(), f'name: "a\\u202egpj.exe" {NAME}'),
    "a name of 1 MB": (f'name = "{"x" * 2**20}"'.encode() + toml(), f'name: "{"x" * 78}… {NAME}'),
    "10,000 levels": (toml(tag="[" * 10_000 + "]" * 10_000), "nested more than 64 levels deep"),
    "2,000 dots": (
        b"a" + b".a" * 2_000 + b" = 1" + toml(),
        f"a{'.a' * 64}: nested more than 64 levels deep",
    ),
    "not UTF-8": (b"\xff\xfe" + toml(), "the file is not UTF-8 text (byte 0)"),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_a_hostile_spec_is_refused_by_the_command_line(tmp_path: Path, case: str) -> None:
    body, line = HOSTILE_FILES[case]
    path = tmp_path / "spec.toml"
    path.write_bytes(body)
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == ExitCode.INVALID
    (problem,) = json.loads(result.stdout)["errors"]
    assert ": ".join(filter(None, problem.values())) == line
