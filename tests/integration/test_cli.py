import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from offbeat.cli import watch
from offbeat.cli.main import app
from offbeat.cli.session import ExitCode, Session
from offbeat.client import OffbeatClient
from offbeat.contracts.runs import EventLevel, RunStatus
from tests import run_views
from tests.integration.fake_orchestrator import ADAPTER, FakeOrchestrator
from tests.servers import serve

RUN_ID = "run-00000000a1"
COMMAND = (sys.executable, "-c", "from offbeat.cli.main import app; app()")


@pytest.fixture
def fake() -> FakeOrchestrator:
    return FakeOrchestrator(runs=[run_views.run(RUN_ID)])


@pytest.fixture
def url(fake: FakeOrchestrator) -> Iterator[str]:
    with serve(fake.app()) as url:
        yield url


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(run_views.SPEC))
    return str(path)


def offbeat(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"OFFBEAT_URL": url})


def lines(text: str) -> list[str]:
    """The lines of a table or of a log without what pads them."""
    return [" ".join(line.split()) for line in text.splitlines()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_spec_file_becomes_a_run(fake: FakeOrchestrator, url: str, spec_file: str) -> None:
    result = offbeat(url, "submit", spec_file, "--name", "mine", "--idempotency-key", "k")
    assert result.exit_code == ExitCode.OK
    assert result.stdout == "run-0000000001  mine  queued\n"
    assert result.stderr == "Watch it: offbeat watch run-0000000001\n"
    again = offbeat(url, "submit", spec_file, "--idempotency-key", "k", "--json")
    assert json.loads(again.stdout)["id"] == "run-0000000001"
    assert again.stderr == ""


def test_a_submitted_run_is_watched_to_its_end(
    fake: FakeOrchestrator, url: str, spec_file: str
) -> None:
    fake.ends_as = RunStatus.FAILED
    fake.first_step = 38
    result = offbeat(url, "submit", spec_file, "--watch")
    assert result.exit_code == ExitCode.RUN_ENDED_BADLY
    assert result.stdout.splitlines() == [
        "queued  step 38/40  reward 0.95  staleness 1.0  182 tok/s",
        "step 39/40  reward 0.97  version 39  staleness 1.0  182 tok/s  eta 3m10s",
        "step 40/40  reward 1.00  version 40  staleness 1.0  182 tok/s",
        "failed after 12m40s, step 40/40, reward 1.00",
    ]
    assert result.stderr == "Submitted chain-sum as run-0000000001.\n"


def test_watching_prints_steps_and_the_events_that_matter(fake: FakeOrchestrator, url: str) -> None:
    fake.events = [
        run_views.event(1, "Step 38: reward 0.95."),
        run_views.event(2, "A job is late.", kind="job_requeued", level=EventLevel.WARNING),
    ]
    fake.ends_as = RunStatus.SUCCEEDED
    fake.replace(run_views.run(RUN_ID, step=38))
    result = offbeat(url, "watch", RUN_ID)
    assert result.exit_code == ExitCode.OK
    at = fake.events[1].at.astimezone()
    assert lines(result.stdout) == [
        f"{at:%Y-%m-%d %H:%M:%S} warning job_requeued A job is late.",
        "step 39/40 reward 0.97 version 39 staleness 1.0 182 tok/s eta 3m10s",
        "step 40/40 reward 1.00 version 40 staleness 1.0 182 tok/s",
        "succeeded after 12m40s, step 40/40, reward 1.00",
    ]


def test_watching_for_programs_is_one_json_object_a_step(fake: FakeOrchestrator, url: str) -> None:
    fake.ends_as = RunStatus.CANCELLED
    fake.replace(run_views.run(RUN_ID, step=38))
    result = offbeat(url, "watch", "latest", "--json")
    assert result.exit_code == ExitCode.RUN_ENDED_BADLY
    seen = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(run["progress"]["step"], run["status"]) for run in seen] == [
        (38, "running"),
        (39, "running"),
        (40, "cancelled"),
    ]


def test_watching_outlives_a_restart_of_the_service_and_says_so_once(
    fake: FakeOrchestrator,
) -> None:
    port, said = free_port(), StringIO()
    with OffbeatClient(f"http://127.0.0.1:{port}", retry_for_s=0) as client:
        session = Session(
            client=client, as_json=False, out=Console(file=StringIO()), err=Console(file=said)
        )
        with serve(fake.app(), port):
            seen = watch.print_plain(session, watch.snapshots(client, fake.runs[0]))
            assert not next(seen).waiting
        assert [next(seen).waiting, next(seen).waiting] == [True, True]
        fake.replace(run_views.run(RUN_ID, status=RunStatus.SUCCEEDED))
        with serve(fake.app(), port):
            assert [snapshot.run.status for snapshot in seen] == [RunStatus.SUCCEEDED]
    assert said.getvalue() == "waiting for the service\n"


def test_stopping_to_watch_leaves_the_run_going(fake: FakeOrchestrator, url: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "watch", RUN_ID, "--url", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED
    assert said == f"Stopped watching; chain-sum goes on. Again: offbeat watch {RUN_ID}\n"
    assert fake.runs[0].status is RunStatus.RUNNING


def test_runs_are_listed_as_a_table_or_as_json(fake: FakeOrchestrator, url: str) -> None:
    fake.runs.append(run_views.run("run-00000000b2", status=RunStatus.QUEUED, step=0, name="[x]"))
    first, second, third = lines(offbeat(url, "list").stdout)
    assert first == "ID NAME STATUS STEP REWARD VERSION AGE"
    assert second.startswith("run-00000000a1 chain-sum running 12/40 0.30 12 ")
    assert third.startswith("run-00000000b2 [x] queued 0/40 – – ")
    runs = json.loads(offbeat(url, "list", "--json", "--limit", "1").stdout)
    assert [run["id"] for run in runs] == [RUN_ID]
    runs = json.loads(offbeat(url, "list", "--json", "--status", "queued").stdout)
    assert [run["id"] for run in runs] == ["run-00000000b2"]


@pytest.mark.parametrize("name", [RUN_ID, "latest", "run-00000000a", "00000000a"])
def test_a_run_is_found_by_id_by_its_beginning_or_as_the_latest(
    fake: FakeOrchestrator, url: str, name: str
) -> None:
    fake.runs.append(run_views.run("run-00000000b2"))
    assert json.loads(offbeat(url, "show", name, "--json").stdout)["id"] == RUN_ID


def test_a_beginning_that_fits_several_runs_is_refused(fake: FakeOrchestrator, url: str) -> None:
    fake.runs.append(run_views.run("run-00000000b2"))
    result = offbeat(url, "cancel", "run-0")
    assert result.exit_code == ExitCode.INVALID
    assert result.stderr == (
        "error: 'run-0' is the beginning of several runs: run-00000000a1, run-00000000b2\n"
    )
    assert offbeat(url, "cancel", "").exit_code == ExitCode.INVALID
    assert [run.status for run in fake.runs] == [RunStatus.RUNNING, RunStatus.RUNNING]


def test_one_run_is_shown_with_what_it_was_asked_to_do(url: str) -> None:
    shown = lines(offbeat(url, "show", RUN_ID).stdout)
    assert shown[:2] == [
        "run-00000000a1 chain-sum running",
        "step 12/40 reward 0.30 version 12 staleness 1.0 182 tok/s eta 3m10s",
    ]
    assert "data reasoning_gym: chain_sum" in shown


def test_runs_are_paused_resumed_cancelled_and_retried(url: str) -> None:
    for verb, status in (
        ("pause", "paused"),
        ("resume", "running"),
        ("cancel", "cancelled"),
        ("retry", "running"),
    ):
        result = offbeat(url, verb, RUN_ID)
        assert result.stdout == f"{RUN_ID}  chain-sum  {status}\n"
    assert json.loads(offbeat(url, "pause", RUN_ID, "--json").stdout)["status"] == "paused"


def test_the_log_is_shown_from_its_end(fake: FakeOrchestrator, url: str) -> None:
    fake.events = [run_views.event(number, f"Event {number}.") for number in range(1, 6)]
    shown = lines(offbeat(url, "events", RUN_ID, "--limit", "2").stdout)
    assert [line.split(" ", 2)[2] for line in shown] == [
        "info step_done Event 4.",
        "info step_done Event 5.",
    ]
    assert [
        event["id"] for event in json.loads(offbeat(url, "events", RUN_ID, "--json").stdout)
    ] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_following_the_log_ends_with_the_run(fake: FakeOrchestrator, url: str) -> None:
    fake.events = [run_views.event(number, f"Event {number}.") for number in range(1, 6)]
    fake.ends_as = RunStatus.SUCCEEDED
    fake.replace(run_views.run(RUN_ID, step=37))
    result = offbeat(url, "events", RUN_ID, "--follow", "--limit", "2", "--json")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == [4, 5]
    assert fake.runs[0].status is RunStatus.SUCCEEDED


def test_series_are_shown_with_their_trend(fake: FakeOrchestrator, url: str) -> None:
    fake.metrics = {"reward": [0.0, 0.5, 1.0], "loss": [0.25]}
    assert lines(offbeat(url, "metrics", RUN_ID).stdout) == [
        "SERIES STEP FIRST LAST MIN MAX TREND",
        "reward 3 0 1 0 1 ▁▅█",
        "loss 1 0.25 0.25 0.25 0.25 ▁",
    ]
    series = json.loads(offbeat(url, "metrics", RUN_ID, "-n", "loss", "--json").stdout)["series"]
    assert series == {"loss": [{"step": 1, "value": 0.25}]}


def test_samples_are_collected_over_short_pages(fake: FakeOrchestrator, url: str) -> None:
    fake.rollouts = [run_views.rollout(n, reward=float(n % 3 == 0)) for n in range(10)]
    arguments = ("rollouts", RUN_ID, "--min-reward", "1", "--limit", "3")
    samples = json.loads(offbeat(url, *arguments, "--json").stdout)
    assert [sample["sample"] for sample in samples] == [0, 3, 6]
    assert lines(offbeat(url, "rollouts", RUN_ID, "--limit", "1").stdout) == [
        "reward 1.00 version 3 step 4 9 tokens stop g-000007#0",
        "prompt What is 3 + 4?",
        "completion 3 + 4 = 6",
        "",
    ]


def test_an_adapter_is_downloaded_or_a_reason_given(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    result = offbeat(url, "adapter", RUN_ID, "-o", str(folder), "--json")
    assert json.loads(result.stdout) == {"run_id": RUN_ID, "version": None, "path": str(folder)}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ADAPTER
    taken = tmp_path / "taken"
    taken.write_text("")
    result = offbeat(url, "adapter", RUN_ID, "-o", str(taken))
    assert result.exit_code == ExitCode.INVALID
    assert result.stderr == f"error: cannot write {taken}: File exists\n"


def test_workers_are_listed(fake: FakeOrchestrator, url: str) -> None:
    fake.workers = [run_views.worker()]
    header, line = lines(offbeat(url, "workers").stdout)
    assert header == "ID ROLE POOL ENGINE STATUS SERVING JOBS SEEN"
    assert line.startswith(
        "generator-1 generator default transformers alive run-00000000a1@12 job-1"
    )
    assert json.loads(offbeat(url, "workers", "--json").stdout)[0]["id"] == "generator-1"


def test_a_spec_is_validated_without_a_service(spec_file: str, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert (
        offbeat(nowhere, "validate", spec_file).stdout.splitlines()[0] == f"{spec_file} is valid."
    )
    assert json.loads(offbeat(nowhere, "validate", spec_file, "--json").stdout)["valid"] is True
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('model = {id = "m"}\ntrain = {learning_rat = 1}\n')
    result = offbeat(nowhere, "validate", str(wrong), "--json")
    assert result.exit_code == ExitCode.INVALID
    assert json.loads(result.stdout)["errors"][-1] == {
        "field": "train.learning_rat",
        "message": "unknown key; did you mean learning_rate?",
    }
    assert result.stderr.splitlines() == [
        "error: data: missing; it has no default",
        "       rewards: a GRPO run needs at least one",
        "       train.steps: missing; it has no default",
        "       train.learning_rat: unknown key; did you mean learning_rate?",
    ]


def test_scripts_can_tell_failures_apart(fake: FakeOrchestrator, url: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("")
    nowhere = f"http://127.0.0.1:{free_port()}"
    fake.replace(run_views.run(RUN_ID, status=RunStatus.SUCCEEDED, step=40))
    codes = {
        ("submit", str(wrong)): ExitCode.INVALID,
        ("submit", "no-such-file.toml"): ExitCode.INVALID,
        ("list", "--limit", "x"): ExitCode.INVALID,
        ("show", "run-x"): ExitCode.NOT_FOUND,
        ("adapter", RUN_ID, "-o", str(tmp_path / "a"), "--version", "99"): ExitCode.NOT_FOUND,
        ("cancel", RUN_ID): ExitCode.REFUSED,
        ("list", "--url", nowhere): ExitCode.UNAVAILABLE,
        ("list", "--url", "localhost:1"): ExitCode.INVALID,
    }
    results = {arguments: offbeat(url, *arguments) for arguments in codes}
    assert {arguments: result.exit_code for arguments, result in results.items()} == codes
    assert all(result.stdout == "" for result in results.values())
    assert not any("Traceback" in result.stderr for result in results.values())


def test_a_wrong_key_is_refused_with_the_place_to_set_it(fake: FakeOrchestrator, url: str) -> None:
    fake.api_key = "secret"
    result = offbeat(url, "list", "--api-key", "wrong")
    assert result.exit_code == ExitCode.REFUSED
    assert result.stderr == (
        "error: send a valid key as `Authorization: Bearer <key>`\n"
        "       The key is --api-key or OFFBEAT_API_KEY.\n"
    )
    assert offbeat(url, "list", "--api-key", "secret").exit_code == ExitCode.OK


def test_a_short_outage_is_not_noticed(fake: FakeOrchestrator, url: str) -> None:
    fake.refusals = 2
    assert offbeat(url, "list").exit_code == ExitCode.OK


def test_the_help_names_the_exit_codes() -> None:
    shown = " ".join(offbeat("", "--help").stdout.split())
    assert "0 done; 1 the run failed or was cancelled" in shown
    assert "5 the service is unavailable" in shown


def test_the_command_loads_nothing_that_the_base_install_lacks() -> None:
    heavy = "fastapi sqlalchemy celery boto3 pyarrow torch structlog pydantic_settings"
    code = (
        "import sys, offbeat.cli.main; "
        f"print([name for name in {heavy.split()} if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert shown.stdout == "[]\n"
