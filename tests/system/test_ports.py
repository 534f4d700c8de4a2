"""Stacks that are started at the same time."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import httpx
import pytest

from scripts.processes import PortTakenError
from scripts.stack import Stack, StackOptions, running_stack

pytestmark = pytest.mark.system


def test_stacks_that_start_at_once_have_ports_of_their_own(tmp_path: Path) -> None:
    """Each is known by its key, which the other refuses."""
    keys = [f"{name}-key-of-{'x' * 16}" for name in ("first", "second")]
    together = Barrier(2)

    def start(key: str) -> Stack:
        options = StackOptions(
            data_dir=tmp_path / key,
            generators=0,
            trainers=0,
            settings={"OFFBEAT_API_KEY": key, "OFFBEAT_WORKER_TOKEN": f"worker-{key}"},
        )
        together.wait()
        return cleanup.enter_context(running_stack(options, sys.stdout))

    with ExitStack() as cleanup:
        with ThreadPoolExecutor(2) as pool:
            stacks = list(pool.map(start, keys))
        used = [vars(stack.addresses).values() for stack in stacks]
        assert len({*used[0], *used[1]}) == 8
        answers = [
            [
                httpx.get(
                    f"{stack.addresses.orchestrator}/v1/runs",
                    headers={"authorization": f"Bearer {key}"},
                ).status_code
                for key in keys
            ]
            for stack in stacks
        ]
    assert answers == [[200, 401], [401, 200]]


@pytest.mark.parametrize("name", ["orchestrator", "weight_proxy", "redis", "s3"])
def test_a_stack_says_that_a_port_it_chose_was_taken_since(tmp_path: Path, name: str) -> None:
    stack = Stack(StackOptions(data_dir=tmp_path, generators=0, trainers=0))
    address = httpx.URL(getattr(stack.addresses, name))
    with ExitStack() as cleanup:
        cleanup.enter_context(socket.create_server((address.host, address.port or 0)))
        cleanup.callback(stack.stop)
        with pytest.raises(PortTakenError, match=r"(?i)address already in use"):
            stack.start(sys.stdout)
