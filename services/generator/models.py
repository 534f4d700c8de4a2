"""The base models that a generator holds, each with its engine and the runs that use it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from transformers import PreTrainedTokenizerBase

from offbeat.contracts.leases import ServedVersion
from offbeat.contracts.run_spec import ModelSection
from services.generator.engines.base import Engine
from services.generator.weights import RunPolicies

log = structlog.get_logger(__name__)

RUNS_MAX = 16
"""Runs followed on one engine: each costs a thread, a connection and the memory of its adapters."""


class BaseModel:
    """One engine, and the policies of the runs on it."""

    def __init__(
        self,
        *,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        new_policies: Callable[[str], RunPolicies],
        positions_max: int | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.positions_max = positions_max
        """Tokens that a prompt and its completion may have together; none where it is not known."""
        self._new_policies = new_policies
        self._lock = threading.Lock()
        self._runs: dict[str, RunPolicies] = {}

    def policies(self, run_id: str) -> RunPolicies:
        """The versions of a run, which is followed from now on."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or not run.touch():
                run = self._runs[run_id] = self._new_policies(run_id)
                run.start()
            if len(self._runs) > RUNS_MAX:
                idlest = max(self._runs, key=lambda other: self._runs[other].idle_s())
                self._runs.pop(idlest).close()
            return run

    def serving(self) -> tuple[ServedVersion, ...]:
        """What jobs could sample with now."""
        with self._lock:
            return tuple(version for run in self._runs.values() for version in run.serving())

    def close(self) -> None:
        """Follow no run any more and give up the engine."""
        with self._lock:
            for run in self._runs.values():
                run.close()
        self.engine.close()


class BaseModels:
    """At most `models_max` base models; the one least recently used makes room for another."""

    def __init__(self, open_model: Callable[[ModelSection], BaseModel], models_max: int) -> None:
        self._open_model = open_model
        self._models_max = models_max
        self._opening = threading.Lock()
        self._changed = threading.Condition()
        self._held: dict[ModelSection, BaseModel] = {}
        """The most recently used one is last."""
        self._users: Counter[ModelSection] = Counter()

    @contextmanager
    def use(self, model: ModelSection) -> Iterator[BaseModel]:
        """The base model, opened if need be, and not closed before the end of the block."""
        key = model.model_copy(update={"chat_template": None})
        with self._opening:
            base = self._held.get(key) or self._open(key)
            with self._changed:
                self._held[key] = self._held.pop(key, base)
                self._users[key] += 1
        try:
            yield base
        finally:
            with self._changed:
                self._users[key] -= 1
                self._changed.notify_all()

    def serving(self) -> tuple[ServedVersion, ...]:
        """What jobs could sample with now, on any model."""
        with self._changed:
            held = list(self._held.values())
        return tuple(version for base in held for version in base.serving())

    def close(self) -> None:
        """Give up every model."""
        with self._changed:
            for base in self._held.values():
                base.close()
            self._held.clear()

    def _open(self, key: ModelSection) -> BaseModel:
        with self._changed:
            while len(self._held) >= self._models_max:
                unused = next((other for other in self._held if not self._users[other]), None)
                if unused is None:
                    self._changed.wait()
                else:
                    self._held.pop(unused).close()
        log.info("Opening a base model.", model=key.id)
        return self._open_model(key)
