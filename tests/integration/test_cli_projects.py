"""`offbeat project` and `offbeat key` against a real orchestrator."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.cli.main import app
from offbeat.cli.session import ExitCode
from offbeat.objects import S3ObjectStore
from tests.orchestrator import running_orchestrator

ADMIN_KEY = "admin-key-0123456789"


@pytest.fixture
def url(tmp_path: Path, valkey_url: str, store: S3ObjectStore) -> Iterator[str]:
    with running_orchestrator(tmp_path, valkey_url, store, api_key=ADMIN_KEY) as running:
        yield running.url


def offbeat(url: str, key: str, *arguments: str) -> Result:
    environment = {"OFFBEAT_URL": url, "OFFBEAT_API_KEY": key}
    return CliRunner().invoke(app, list(arguments), env=environment)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_an_admin_makes_a_project_and_its_key_works_until_it_is_deleted(url: str) -> None:
    made = offbeat(url, ADMIN_KEY, "project", "create", "team-a", "--active-runs-max", "5")
    assert lines(made.stdout) == [
        "PROJECT ACTIVE RUNS JOBS IN FLIGHT STORED BYTES",
        "team-a 0/5 0/10000 0/10995116277760",
    ]
    created = offbeat(url, ADMIN_KEY, "key", "create", "team-a", "alice")
    (secret,) = lines(created.stdout)
    assert "It cannot be shown again." in created.stderr
    assert offbeat(url, secret, "project", "show", "team-a").exit_code == ExitCode.OK
    assert offbeat(url, secret, "project", "list").exit_code == ExitCode.REFUSED
    listed = offbeat(url, ADMIN_KEY, "key", "list", "team-a")
    assert secret not in listed.stdout
    header, row = lines(listed.stdout)
    assert header == "ID NAME CREATED"
    key_id = row.split()[0]
    deleted = offbeat(url, ADMIN_KEY, "key", "delete", "team-a", key_id)
    assert lines(deleted.stdout) == [f"{key_id} is deleted."]
    refused = offbeat(url, secret, "list")
    assert refused.exit_code == ExitCode.REFUSED
    assert "The key is --api-key or OFFBEAT_API_KEY." in refused.stderr


def test_programs_read_projects_and_keys_as_json(url: str) -> None:
    offbeat(url, ADMIN_KEY, "project", "create", "team-a")
    changed = offbeat(
        url, ADMIN_KEY, "project", "limit", "team-a", "--stored-bytes-max", "7", "--json"
    )
    assert json.loads(changed.stdout)["quotas"] == {
        "active_runs_max": 1000,
        "jobs_in_flight_max": 10000,
        "stored_bytes_max": 7,
    }
    projects = json.loads(offbeat(url, ADMIN_KEY, "project", "list", "--json").stdout)
    assert [project["id"] for project in projects] == ["default", "team-a"]
    key = json.loads(offbeat(url, ADMIN_KEY, "key", "create", "team-a", "bob", "--json").stdout)
    assert key["secret"].startswith("ofb_")
    assert (key["key"]["project_id"], key["key"]["name"]) == ("team-a", "bob")


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "ümlaut"])
def test_a_key_that_no_header_can_carry_is_not_repeated(url: str, key: str) -> None:
    refused = offbeat(url, key, "list")
    assert refused.exit_code == ExitCode.INVALID
    assert lines(refused.stderr) == [
        "error: the key has a space, a line break or the like: copy it again"
    ]
