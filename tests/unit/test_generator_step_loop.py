"""The engine's thread: whose turn it is, and where errors go."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbeat.errors import UnavailableError
from services.generator.engines.step_loop import URGENT_STEPS_MAX, StepLoop, Steps


def counting(name: str, num_steps: int, trace: list[str]) -> Steps[str]:
    """A task that leaves its name in the trace at every step."""
    for _ in range(num_steps):
        trace.append(name)
        yield
    return name


class Gate:
    """Holds a task at its start, so that others are queued behind it before anything runs."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def before(self, steps: Steps[str]) -> Steps[str]:
        """The task, held at its first step until the gate opens."""
        self.reached.set()
        self.opened.wait()
        return (yield from steps)


def test_a_task_returns_its_result() -> None:
    loop = StepLoop("test")
    assert loop.run(counting("a", 3, [])) == "a"
    loop.close()


def test_an_error_reaches_the_caller_and_the_loop_goes_on() -> None:
    def failing() -> Steps[None]:
        yield
        raise ValueError("broken")

    loop = StepLoop("test")
    with pytest.raises(ValueError, match="broken"):
        loop.run(failing())
    assert loop.run(counting("a", 1, [])) == "a"
    loop.close()


def test_equal_tasks_take_turns() -> None:
    loop, gate, trace = StepLoop("test"), Gate(), []
    with ThreadPoolExecutor(2) as pool:
        a = pool.submit(loop.run, gate.before(counting("a", 4, trace)))
        gate.reached.wait()
        b = pool.submit(loop.run, counting("b", 4, trace))
        wait_for(loop, lambda: num_waiting(loop) == 1)
        gate.opened.set()
        assert (a.result(), b.result()) == ("a", "b")
    assert trace == ["a", "b"] * 4
    loop.close()


def test_urgent_tasks_go_first_but_never_hold_up_the_others_for_long() -> None:
    loop, gate, trace = StepLoop("test"), Gate(), []
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(loop.run, gate.before(counting("b", 3, trace)))
        gate.reached.wait()
        canary = pool.submit(loop.run, counting("c", 2 * URGENT_STEPS_MAX, trace), urgent=True)
        wait_for(loop, lambda: num_waiting(loop) == 1)
        gate.opened.set()
        batch.result()
        canary.result()
    urgent = ["c"] * URGENT_STEPS_MAX
    assert trace == ["b", *urgent, "b", *urgent, "b"]
    loop.close()


def test_a_closed_loop_refuses_what_waits_and_what_comes() -> None:
    loop, gate = StepLoop("test"), Gate()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(loop.run, gate.before(counting("a", 3, [])))
        gate.reached.wait()
        waiting = pool.submit(loop.run, counting("b", 3, []))
        wait_for(loop, lambda: num_waiting(loop) == 1)
        closing = pool.submit(loop.close)
        wait_for(loop, lambda: loop._closing)
        gate.opened.set()
        closing.result()
        for task in (running, waiting):
            with pytest.raises(UnavailableError, match="closed"):
                task.result()
    with pytest.raises(UnavailableError, match="closed"):
        loop.run(counting("c", 1, []))


def num_waiting(loop: StepLoop) -> int:
    return sum(map(len, loop._waiting.values()))


def wait_for(loop: StepLoop, condition: Callable[[], bool]) -> None:
    with loop._changed:
        assert loop._changed.wait_for(condition, timeout=60)
