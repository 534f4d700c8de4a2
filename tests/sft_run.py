"""One supervised run, driven job by job."""

from dataclasses import dataclass
from typing import Any

from offbeat.contracts.jobs import (
    ExampleBatch,
    InitInput,
    TokenizeInput,
    TokenizeOutput,
    TrainInput,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Manifest
from offbeat.worker import JobContext
from offbeat.worker_api import WeightProxyClient
from services.trainer.publish import Trainer
from services.trainer.run import init, train
from services.trainer.sft_tokenize import tokenize
from tests.trainer import finished, lease_of


@dataclass(frozen=True, kw_only=True)
class SftRun:
    """One supervised run, driven job by job."""

    run_id: str
    spec: RunSpec
    proxy: WeightProxyClient

    def context(self, job: Any, job_id: str, attempt: int = 1) -> JobContext:
        return JobContext(lease_of(self.run_id, self.spec, job, job_id, attempt))

    def tokenize(self, trainer: Trainer) -> TokenizeOutput:
        return tokenize(self.context(TokenizeInput(), "tokenize"), trainer)

    def init(self, trainer: Trainer, data: TokenizeOutput) -> Manifest:
        job = InitInput(prompts_key=data.prompts_key, eval_prompts_key=data.eval_prompts_key)
        return init(self.context(job, "init"), trainer).manifest

    def step(self, data: TokenizeOutput, base_version: int, rows: tuple[int, ...]) -> TrainInput:
        examples = ExampleBatch(
            examples_key=data.prompts_key, rows=rows, eval_examples_key=data.eval_prompts_key
        )
        return TrainInput(base_version=base_version, examples=examples)

    def train(
        self, trainer: Trainer, data: TokenizeOutput, base_version: int, rows: tuple[int, ...]
    ) -> Manifest:
        job = self.step(data, base_version, rows)
        return finished(train(self.context(job, f"train-{base_version}"), trainer))
