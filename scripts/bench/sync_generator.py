"""A generator of the weight-sync benchmark as a process of its own.

    python -m scripts.bench.sync_generator <task as JSON>

It follows the run with the product's own code, and generates all the time with the newest version.
Beside that a second job waits for every version and draws one token of it. What happens is written
to the standard output, a `Mark` a line. The end of the standard input ends the process, which then
leaves the times of its steps in `steps.json`.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Literal

from offbeat.contracts.base import Contract
from offbeat.contracts.leases import WorkerEvent
from offbeat.contracts.run_spec import ModelSection
from offbeat.logs import configure_logs
from offbeat.settings import LogSettings
from offbeat.worker_api import WeightProxyClient
from scripts.bench.sync_cases import EngineKind
from scripts.bench.sync_engine import LightEngine
from services.generator.engines.base import Engine, SampleRequest, Sampling
from services.generator.weights import RunPolicies

SPARE_VERSIONS = 2
"""The default of generators."""
SEQUENCES_MAX = 64
PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 8, 46
"""The job that is always under way: that of `make demo`."""
JOB = Sampling(max_new_tokens=24, temperature=1.0)
ONE_TOKEN = Sampling(max_new_tokens=1, temperature=1.0)

Stage = Literal["visible", "loaded", "served", "sampled"]
"""How far a generator is with a version: its long-poll was answered, the engine has read it, its
canary is proved, a job has drawn from it."""


class GeneratorTask(Contract):
    """What a process needs."""

    name: str
    run_id: str
    proxy_url: str
    model: ModelSection
    engine: EngineKind
    folder: Path


class Mark(Contract):
    """A generator has come so far with a version, at this Unix time."""

    generator: str
    version: int
    stage: Stage
    at: float


class Steps(Contract):
    """When a step of the job that is always under way began, in Unix time."""

    at: tuple[float, ...] = ()


class ClosingError(Exception):
    """The benchmark is over."""


class Timeline:
    """Tells the benchmark what happens, when it happens."""

    def __init__(self, generator: str) -> None:
        self._generator = generator
        self._lock = threading.Lock()

    def served(self, event: WorkerEvent) -> None:
        """Takes the product's event, which says how long each part took; the run's log is told
        once the version can be used."""
        if event.kind != "version_served":
            raise RuntimeError(event.message)
        at = time.time()
        version = int(str(event.data["version"]))
        canary_s, load_s, download_s = (
            float(str(event.data[part])) for part in ("canary_s", "load_s", "download_s")
        )
        self.mark(version, "visible", at - canary_s - load_s - download_s)
        self.mark(version, "loaded", at - canary_s)
        self.mark(version, "served", at)

    def mark(self, version: int, stage: Stage, at: float) -> None:
        """One line."""
        line = Mark(generator=self._generator, version=version, stage=stage, at=at)
        with self._lock:
            print(line.model_dump_json(), flush=True)


def open_engine(task: GeneratorTask) -> Engine:
    """The engine of the task; only the real one needs torch."""
    if task.engine == "light":
        return LightEngine()
    import torch

    from offbeat.models import load_tokenizer
    from services.generator.engines.model import LoraModel
    from services.generator.engines.transformers import TransformersEngine

    folder = Path(task.model.id)
    model = LoraModel.open(folder, getattr(torch, task.model.dtype), torch.device("cpu"))
    return TransformersEngine(model, load_tokenizer(folder, None), SEQUENCES_MAX)


def keep_generating(
    engine: Engine, policies: RunPolicies, check: Callable[[], None], steps: list[float]
) -> None:
    """One job after the other, each with the newest version."""
    requests = [
        SampleRequest(
            prompt_ids=tuple(range(1000 + prompt, 1000 + prompt + PROMPT_TOKENS)),
            seeds=tuple(range(SAMPLES)),
        )
        for prompt in range(PROMPTS)
    ]

    def note_step() -> None:
        check()
        steps.append(time.time())

    while True:
        with policies.newest(0, check=check) as policy:
            engine.generate(requests, policy.name, JOB, check=note_step)


def draw_from_each(
    engine: Engine, policies: RunPolicies, check: Callable[[], None], timeline: Timeline
) -> None:
    """A job that waits for every version in turn."""
    request, wanted = SampleRequest(prompt_ids=(1000, 1001), seeds=(0,)), 0
    while True:
        with policies.newest(wanted, check=check) as policy:
            engine.generate([request], policy.name, ONE_TOKEN, check=check)
            timeline.mark(policy.version, "sampled", time.time())
            wanted = policy.version + 1


def main() -> None:
    """Follow the run until the benchmark closes the standard input."""
    task = GeneratorTask.model_validate_json(sys.argv[1])
    configure_logs(LogSettings(), task.name)
    closing, steps, timeline = threading.Event(), list[float](), Timeline(task.name)

    def check() -> None:
        if closing.is_set():
            raise ClosingError

    def close_at_end_of_input() -> None:
        sys.stdin.read()
        closing.set()

    threading.Thread(target=close_at_end_of_input, daemon=True).start()
    engine = open_engine(task)
    policies = RunPolicies(
        task.run_id,
        engine=engine,
        model=task.model,
        proxy=WeightProxyClient(task.proxy_url),
        tell=timeline.served,
        folder=task.folder,
        spare_max=SPARE_VERSIONS,
    )
    policies.start()
    with ThreadPoolExecutor(2) as jobs:
        under_way = (
            jobs.submit(keep_generating, engine, policies, check, steps),
            jobs.submit(draw_from_each, engine, policies, check, timeline),
        )
        wait(under_way, return_when=FIRST_COMPLETED)
        closing.set()  # Where one failed, the other ends too, and the benchmark notices.
    for job in under_way:
        with suppress(ClosingError):
            job.result()
    policies.close()
    engine.close()
    (task.folder / "steps.json").write_text(Steps(at=tuple(steps)).model_dump_json())


if __name__ == "__main__":
    main()
