"""`offbeat chat` against a real orchestrator and generator."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.cli.session import ExitCode
from offbeat.cli.text import safe
from offbeat.contracts.jobs import JobStatus
from offbeat.objects import S3ObjectStore
from tests.chat import RENDERED, Setting, running_chat
from tests.waiting import wait_until

COMMAND = (sys.executable, "-c", "from offbeat.cli.main import app; app()")
GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def setting(
    valkey_url: str,
    store: S3ObjectStore,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setting]:
    with running_chat(tmp_path_factory.mktemp("chat"), valkey_url, store, tiny_model) as setting:
        yield setting


def offbeat(
    setting: Setting, *arguments: str, said: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the services of this one log to its stdout."""
    command = [*COMMAND, "chat", *arguments, "--url", setting.orchestrator.url]
    return subprocess.run(
        command, input=said, capture_output=True, text=True, check=False, timeout=60
    )


def test_one_question_gets_one_answer(setting: Setting) -> None:
    run_id = setting.new_run()
    result = offbeat(setting, run_id, "--message", "hello", *GREEDY)
    assert result.returncode == ExitCode.OK
    assert result.stdout == safe(setting.greedy(1, 6)) + "\n"
    assert result.stderr == f"{run_id}@1, 6 tokens\n"


def test_a_version_may_be_named_and_the_run_be_abbreviated(setting: Setting) -> None:
    run_id = setting.new_run()
    short = run_id.removeprefix("run-")[:8]
    result = offbeat(setting, f"{short}@0", "-m", "hello", "--json", *GREEDY)
    answer = json.loads(result.stdout)
    assert answer["model"] == f"{run_id}@0"
    assert answer["answer"] == setting.greedy(0, 6)
    assert answer["usage"]["completion_tokens"] == 6


def test_a_conversation_is_remembered_until_it_is_reset(setting: Setting) -> None:
    run_id = setting.new_run()
    result = offbeat(setting, run_id, *GREEDY, said="hello\nhello\n/reset\n\n/huh\nhello\n/quit\n")
    first = setting.greedy(1, 6)
    both = RENDERED + first + "<|im_end|>\n" + RENDERED
    assert result.returncode == ExitCode.OK
    answers = [first, setting.greedy(1, 6, both), first]
    assert result.stdout == "".join(safe(answer) + "\n" for answer in answers)


def test_what_cannot_be_answered_ends_the_question_and_not_the_conversation(
    setting: Setting,
) -> None:
    run_id = setting.new_run()
    result = offbeat(setting, run_id, *GREEDY, said="x" * 300 + "\nhello\n")
    assert "error: messages: they have" in result.stderr
    assert result.stdout == safe(setting.greedy(1, 6)) + "\n"
    once = offbeat(setting, run_id, "--message", "x" * 300)
    assert once.returncode == ExitCode.INVALID
    missing = offbeat(setting, f"{run_id}@7", "--message", "hello")
    assert missing.returncode == ExitCode.NOT_FOUND
    assert "has no version 7: the newest is 1" in missing.stderr


def test_ctrl_c_stops_the_answer_and_not_the_conversation(setting: Setting) -> None:
    run_id = setting.new_run()
    setting.engine.permits = threading.Semaphore(40)
    ended = setting.engine.num_ended
    process = subprocess.Popen(
        [*COMMAND, "chat", run_id, "--url", setting.orchestrator.url, *GREEDY[:3], "200"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: setting.jobs(run_id) == [(JobStatus.CANCELLED, None)])
    setting.engine.permits.release(1000)
    setting.engine.permits = None
    wait_until(lambda: setting.engine.num_ended > ended)
    _, said = process.communicate("/reset\nhello\n", timeout=60)
    assert process.returncode == ExitCode.OK
    assert "stopped" in said
    assert said.endswith(f"{run_id}@1, 200 tokens\n")
