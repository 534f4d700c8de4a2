"""A vLLM engine on a server of the tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from offbeat.contracts.run_spec import ModelSection
from offbeat.models import load_tokenizer
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.engines.vllm import VllmEngine, VllmOptions
from services.generator.engines.vllm_command import AdapterLimits
from services.generator.engines.vllm_http import ServerAddress
from tests.fake_vllm import FakeVllm
from tests.policies import policy_tensors, write_policy
from tests.waiting import wait_until

MODEL = ModelSection(id="tiny", dtype="float32")
SAMPLED = Sampling(max_new_tokens=8, temperature=1.0)
GREEDY = Sampling(max_new_tokens=8, temperature=0.0)
PROMPT = (1, 40, 41, 42, 0, 1, 50)
REQUESTS = [
    SampleRequest(prompt_ids=PROMPT, seeds=(7, 8, 2**62)),
    SampleRequest(prompt_ids=(1, 60), seeds=(9,)),
]
ONE = [SampleRequest(prompt_ids=PROMPT, seeds=(0,))]


def vllm_engine(
    url: str,
    model_folder: Path,
    adapters_folder: Path,
    *,
    api_key: str | None = None,
    **options: Any,
) -> VllmEngine:
    """With short timeouts; `options` are those of `VllmOptions`."""
    return VllmEngine(
        VllmOptions(
            address=ServerAddress(url=url, api_key=SecretStr(api_key) if api_key else None),
            **{
                "limits": AdapterLimits(max_loras=8, max_lora_rank=16),
                "sequences_max": 4,
                "start_timeout_s": 5.0,
                "request_timeout_s": 30.0,
                **options,
            },
        ),
        model=MODEL,
        model_folder=model_folder,
        tokenizer=load_tokenizer(model_folder, None),
        adapters_folder=adapters_folder,
    )


@dataclass(kw_only=True)
class VllmSetting:
    """A server, an engine on it, and folders of adapters."""

    fake: FakeVllm
    url: str
    engine: VllmEngine
    model_folder: Path
    folder: Path

    def policy(self, version: int, *, step: float = 0.0003) -> Path:
        path = self.folder / f"policy-{version}-{step}"
        if not path.is_dir():
            write_policy(path, policy_tensors(version, step=step))
        return path

    def another_engine(self, url: str | None = None, **options: Any) -> VllmEngine:
        return vllm_engine(url or self.url, self.model_folder, self.folder, **options)


@contextmanager
def checked_engine(
    fake: FakeVllm, url: str, model_folder: Path, folder: Path
) -> Iterator[VllmSetting]:
    """A server without faults, and an engine that has checked it."""
    fake.reset()
    fake.model_folder = model_folder
    engine = vllm_engine(url, model_folder, folder)
    try:
        assert engine.loaded() == frozenset()
        fake.bodies.clear()
        fake.contents.clear()
        fake.unloads.clear()
        yield VllmSetting(
            fake=fake, url=url, engine=engine, model_folder=model_folder, folder=folder
        )
    finally:
        engine.close()
        # A request that was given up must not end within the next test's count.
        fake.hangs = False
        wait_until(lambda: fake.running == 0)


def flat(completions: list[list[Completion]]) -> list[Completion]:
    """The samples of all requests."""
    return [completion for group in completions for completion in group]
