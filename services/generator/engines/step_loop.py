"""A thread that owns a model and shares it between tasks, one step at a time.

A task is a generator that yields after every step of its work, and returns its result. Between two
steps any other task may go on, so a new policy is proved while a batch is under way. Nothing here
knows what a step does.
"""

import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from offbeat.errors import UnavailableError

T = TypeVar("T")
Steps = Generator[None, None, T]

URGENT_STEPS_MAX = 4
"""Steps of urgent tasks for each step of the others. A step of a single sequence, as urgent tasks
have, costs about a fifth of a batch's, so a batch is held up by less than a step of its own."""


@dataclass(frozen=True, kw_only=True)
class _Task(Generic[T]):
    steps: Steps[T]
    urgent: bool
    result: Future[T] = field(default_factory=Future)


class StepLoop:
    """Runs tasks for callers that wait, so there are never more tasks than waiting threads."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[bool, deque[_Task]] = {True: deque(), False: deque()}
        self._urgent_steps = 0
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, steps: Steps[T], *, urgent: bool = False) -> T:
        """The result of the task, or what it raised; `UnavailableError` once closed."""
        task = _Task(steps=steps, urgent=urgent)
        self._put(task)
        return task.result.result()

    def close(self) -> None:
        """Take no more steps; tasks that are not finished raise `UnavailableError`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _put(self, task: _Task) -> None:
        with self._changed:
            if self._closing:
                task.result.set_exception(_closed())
                return
            self._waiting[task.urgent].append(task)
            self._changed.notify_all()

    def _loop(self) -> None:
        while task := self._next():
            try:
                next(task.steps)
            except StopIteration as end:
                task.result.set_result(end.value)
            except BaseException as error:  # noqa: BLE001 - it belongs to the task's caller
                task.result.set_exception(error)
            else:
                self._put(task)
        for waiting in self._waiting.values():
            while waiting:
                waiting.popleft().result.set_exception(_closed())

    def _next(self) -> _Task | None:
        """The task whose turn it is; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or any(self._waiting.values()))
            if self._closing:
                return None
            urgent, others = self._waiting[True], self._waiting[False]
            if urgent and not (others and self._urgent_steps >= URGENT_STEPS_MAX):
                self._urgent_steps += 1
                return urgent.popleft()
            self._urgent_steps = 0
            return others.popleft()


def _closed() -> UnavailableError:
    return UnavailableError("the engine was closed: try again")
