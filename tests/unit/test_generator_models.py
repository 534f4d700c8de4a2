"""Which base models a generator holds."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offbeat.contracts.run_spec import ModelSection
from offbeat.errors import UnavailableError
from offbeat.models import load_tokenizer
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)
from services.generator.models import BaseModel, BaseModels
from services.generator.weights import RunPolicies


class IdleEngine:
    """An engine that is only opened and closed."""

    name = "idle"

    def __init__(self, model_id: str, log: list[str]) -> None:
        self._model_id, self._log = model_id, log
        log.append(f"open {model_id}")

    def load(self, policy: str, folder: Path) -> None: ...

    def unload(self, policy: str) -> None: ...

    def loaded(self, *, check: Callable[[], None] = never_cancelled) -> frozenset[str]:
        return frozenset()

    def generate(
        self,
        requests: Sequence[SampleRequest],
        policy: str,
        sampling: Sampling,
        *,
        urgent: bool = False,
        check: Callable[[], None] = never_cancelled,
        on_tokens: Callable[[Sequence[int]], None] = not_heard,
    ) -> list[list[Completion]]:
        raise UnavailableError("an idle engine")

    def close(self) -> None:
        self._log.append(f"close {self._model_id}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def open_model(tiny_model: Path, log: list[str]) -> Callable[[ModelSection], BaseModel]:
    tokenizer = load_tokenizer(tiny_model, None)

    def no_policies(run_id: str) -> RunPolicies:
        raise UnavailableError(run_id)

    return lambda model: BaseModel(
        engine=IdleEngine(model.id, log), tokenizer=tokenizer, new_policies=no_policies
    )


def use(models: BaseModels, model_id: str, chat_template: str | None = None) -> None:
    with models.use(ModelSection(id=model_id, chat_template=chat_template)):
        pass


def test_the_model_used_longest_ago_makes_room(
    open_model: Callable[[ModelSection], BaseModel], log: list[str]
) -> None:
    models = BaseModels(open_model, models_max=2)
    for model_id in ("a", "b", "a", "c", "a", "b"):
        use(models, model_id)
    assert log == ["open a", "open b", "close b", "open c", "close c", "open b"]
    models.close()
    assert log[-2:] == ["close a", "close b"]


def test_the_chat_template_makes_no_other_model(
    open_model: Callable[[ModelSection], BaseModel], log: list[str]
) -> None:
    models = BaseModels(open_model, models_max=1)
    use(models, "a")
    use(models, "a", chat_template="{{ messages }}")
    assert log == ["open a"]


def test_a_model_in_use_is_waited_for(
    open_model: Callable[[ModelSection], BaseModel], log: list[str]
) -> None:
    models = BaseModels(open_model, models_max=1)
    used, finish = threading.Event(), threading.Event()

    def job() -> None:
        with models.use(ModelSection(id="a")):
            used.set()
            finish.wait()
            log.append("done with a")

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(job)
        used.wait()
        other = pool.submit(use, models, "b")
        finish.set()
        running.result()
        other.result()
    assert log == ["open a", "done with a", "close a", "open b"]


def test_a_model_that_does_not_open_leaves_room_for_another(
    open_model: Callable[[ModelSection], BaseModel], log: list[str]
) -> None:
    def fail_once(model: ModelSection) -> BaseModel:
        if model.id == "broken":
            raise UnavailableError("no such model")
        return open_model(model)

    models = BaseModels(fail_once, models_max=1)
    use(models, "a")
    with pytest.raises(UnavailableError):
        use(models, "broken")
    use(models, "b")
    assert log == ["open a", "close a", "open b"]
