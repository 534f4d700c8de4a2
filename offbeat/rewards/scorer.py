"""Scores samples in a child process under a time limit, for rewards can hang, crash and lie.

    part -> load (imports, regexes) -> score, each one task of a pool of one process

A child that is late or dies is replaced; what it was scoring stays unscored, with the reason. One
thread at a time may use a scorer.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from pebble import ProcessExpired, ProcessPool

from offbeat.contracts.run_spec import RewardSection
from offbeat.errors import WorkerError
from offbeat.rewards import child
from offbeat.rewards.combine import combine
from offbeat.rewards.scores import PartScores, RewardFailure, RewardSample, ScoredBatch

LOAD_TIMEOUT_S = 120.0
"""To import what a part needs: not counted in its own limit, which a new child would then never
keep."""
START_TIMEOUT_S = 120.0
"""To start a child on a busy machine, before the limit of its task begins."""

TRIES_MAX = 2
"""Of a task whose process ends: a process that was killed from outside must not change a reward."""

P = ParamSpec("P")
T = TypeVar("T")


class RewardScorer:
    """The parts of a run's reward, and the process in which they run."""

    def __init__(self) -> None:
        self._pool = _new_pool()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._pool.stop()
        self._pool.join()

    def warm_up(self) -> None:
        """Start the child now, without waiting for it."""
        self._pool.schedule(os.getpid)

    def check(self, parts: Sequence[RewardSection]) -> tuple[RewardFailure, ...]:
        """What is wrong with the parts themselves: paths that lead nowhere, regexes that are
        none."""
        problems = [(part.label, self._load(part)) for part in parts]
        return tuple(
            RewardFailure(part=label, message=problem) for label, problem in problems if problem
        )

    def score(self, parts: Sequence[RewardSection], samples: Sequence[RewardSample]) -> ScoredBatch:
        """One score a sample, in their order. Never raises for what a reward does."""
        scored = [self._score(part, samples) for part in parts]
        return ScoredBatch(
            scores=combine(parts, scored),
            failures=tuple(
                RewardFailure(part=part.label, message=scores.problem)
                for part, scores in zip(parts, scored, strict=True)
                if scores.problem
            ),
        )

    def _score(self, part: RewardSection, samples: Sequence[RewardSample]) -> PartScores:
        problem = self._load(part)
        if problem:
            return child.unscored(len(samples), problem)
        try:
            return self._call(part.timeout_s, child.score_part, part, samples)
        except WorkerError as error:
            return child.unscored(len(samples), error.detail)

    def _load(self, part: RewardSection) -> str | None:
        try:
            return self._call(LOAD_TIMEOUT_S, child.load_part, part)
        except WorkerError as error:
            return error.detail

    def _call(self, limit_s: float, task: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        code: object = "unknown"
        for _ in range(TRIES_MAX):
            if not self._pool.active:  # its child died between two tasks
                self.close()
                self._pool = _new_pool()
            future = self._pool.schedule(
                child.run, args=(limit_s, task, *args), kwargs=kwargs, timeout=limit_s
            )
            try:
                return future.result(timeout=START_TIMEOUT_S + limit_s)
            except TimeoutError as error:
                future.cancel()
                raise WorkerError(f"was not done after {limit_s:g} s") from error
            except (ProcessExpired, BrokenProcessPool) as error:
                code = getattr(error, "exitcode", code)
        raise WorkerError(f"ended its process {TRIES_MAX} times, with exit code {code}")


def _new_pool() -> ProcessPool:
    return ProcessPool(
        max_workers=1,
        initializer=child.start,
        context=multiprocessing.get_context("spawn"),
    )
