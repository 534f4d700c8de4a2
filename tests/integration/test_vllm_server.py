"""A supervised server: a real process that is started, killed, started again, ended.

The fake server stands in for vLLM behind a script in the place of vLLM's Python.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.testing import LogCapture

from offbeat.errors import UnavailableError
from offbeat.models import load_tokenizer
from services.generator.engines.base import SampleRequest, Sampling
from services.generator.engines.vllm import VllmEngine
from services.generator.engines.vllm_engines import VllmEngines
from services.generator.engines.vllm_server import STARTS_MAX, VllmServer, wait_until_healthy
from services.generator.settings import GeneratorSettings
from tests.policies import policy_tensors, write_policy
from tests.vllm_engine import MODEL
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
REQUESTS = [SampleRequest(prompt_ids=(1, 40, 41), seeds=(3,))]
SAMPLED = Sampling(max_new_tokens=4, temperature=1.0)


@pytest.fixture
def log() -> Iterator[LogCapture]:
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture
    structlog.reset_defaults()


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def is_alive(pid: int) -> bool:
    """A process that has ended but is not waited for yet does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[VllmEngine]:
    python = script(
        tmp_path / "python",
        f'shift 2; cd {ROOT}; exec {sys.executable} -m tests.fake_vllm "$@"',
    )
    settings = GeneratorSettings(
        engine="vllm", vllm_python=str(python), vllm_start_timeout_s=240, vllm_max_lora_rank=16
    )
    engine = VllmEngines(settings, tmp_path / "adapters").open(
        MODEL, tiny_model, load_tokenizer(tiny_model, None)
    )
    yield engine
    engine.close()


def test_a_server_that_is_killed_is_started_again(engine: VllmEngine, tmp_path: Path) -> None:
    folder = write_policy(tmp_path / "v1", policy_tensors(1))
    engine.load("run-v1", folder)
    before = engine.generate(REQUESTS, "run-v1", SAMPLED)
    assert engine._server is not None
    first = engine._server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_alive(first))
    with pytest.raises(UnavailableError):
        engine.generate(REQUESTS, "run-v1", SAMPLED)
    assert engine.loaded() == frozenset(), "waits for the new one"
    engine.load("run-v1", folder)
    assert engine.generate(REQUESTS, "run-v1", SAMPLED) == before
    second = engine._server.pid
    assert second is not None
    engine.close()
    assert not is_alive(second)


def test_children_of_a_server_that_was_killed_are_ended(tmp_path: Path, log: LogCapture) -> None:
    """As vLLM's engine, which would keep the GPU. It holds the pipe of the log, too."""
    child_file = tmp_path / "child"
    command = script(
        tmp_path / "vllm",
        f"sleep 600 & echo $! > {child_file}.new\nmv {child_file}.new {child_file}\nwait",
    )
    server = VllmServer([str(command)], {}, lambda: None, pause_first_s=0.01)
    wait_until(child_file.is_file)
    child, leader = int(child_file.read_text()), server.pid
    assert leader is not None
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: not is_alive(child))
    wait_until(lambda: server.pid != leader)
    server.close()


def test_a_server_that_does_not_stay_up_is_given_up(tmp_path: Path, log: LogCapture) -> None:
    given_up: list[str] = []
    command = script(tmp_path / "vllm", 'echo "no module named vllm: $KIND"; exit 3')
    server = VllmServer(
        [str(command)], {"KIND": "test"}, lambda: given_up.append("now"), pause_first_s=0.001
    )
    with pytest.raises(
        UnavailableError, match=f"vLLM ended {STARTS_MAX} times in a row .exit code 3"
    ):
        wait_until_healthy(lambda: False, lambda: server.problem, timeout_s=60)
    wait_until(lambda: given_up == ["now"])
    assert server.problem is not None
    assert "OFFBEAT_VLLM_PYTHON and OFFBEAT_VLLM_ARGS" in server.problem
    server.close()
    ends = [entry for entry in log.entries if entry["event"] == "vLLM ended."]
    assert [entry["pause_s"] for entry in ends] == [0.001 * 2**number for number in range(6)]
    lines = [entry["line"] for entry in log.entries if entry["event"] == "vLLM says."]
    assert set(lines) == {"no module named vllm: test"}


def test_a_program_that_is_not_there_is_given_up(tmp_path: Path, log: LogCapture) -> None:
    server = VllmServer([str(tmp_path / "nothing")], {}, lambda: None, pause_first_s=0.001)
    wait_until(lambda: server.problem is not None)
    server.close()


def test_the_end_of_the_generator_ends_the_server(tmp_path: Path) -> None:
    """Also where the generator is killed, on Linux: nobody else would free the GPU."""
    script_file = tmp_path / "generator.py"
    script_file.write_text(
        "import time\n"
        "from services.generator.engines.vllm_server import VllmServer\n"
        "server = VllmServer(['sleep', '600'], {}, lambda: None)\n"
        "while server.pid is None:\n"
        "    time.sleep(0.01)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{server.pid}}.')\n"
        "time.sleep(600)\n"
    )
    generator = subprocess.Popen(
        [sys.executable, str(script_file)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.is_file() and pid_file.read_text().endswith("."))
    server = int(pid_file.read_text()[:-1])
    assert is_alive(server)
    generator.kill()
    generator.wait()
    wait_until(lambda: not is_alive(server))
