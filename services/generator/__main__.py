"""`python -m services.generator`: the composition root."""

from functools import lru_cache
from pathlib import Path

import structlog
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from offbeat.chat_channel import ChatSpeaker
from offbeat.connection import connected
from offbeat.contracts.jobs import JobKind, WorkerRole
from offbeat.contracts.run_spec import ModelSection
from offbeat.departure import Departure
from offbeat.devices import device_of
from offbeat.logs import configure_logs
from offbeat.models import load_tokenizer, max_positions, resolve_model
from offbeat.objects import WORKER_RETRY_S, S3ObjectStore
from offbeat.outbox import Outbox
from offbeat.presence import Presence
from offbeat.queue import create_celery
from offbeat.rewards.scorer import RewardScorer
from offbeat.tables import PromptRow, decode_prompts
from offbeat.worker import Handler, JobRunner, consume, worker_identity
from offbeat.worker_api import OrchestratorClient, WeightProxyClient
from services.generator.chat import chat
from services.generator.chat_lane import ChatLane
from services.generator.engines.base import Engine
from services.generator.engines.model import LoraModel
from services.generator.engines.transformers import TransformersEngine
from services.generator.engines.vllm_engines import VllmEngines
from services.generator.evaluate import evaluate
from services.generator.models import BaseModel, BaseModels
from services.generator.prepare import prepare
from services.generator.pull import Scratch
from services.generator.rollout import generate
from services.generator.sample import Generator
from services.generator.settings import GeneratorSettings
from services.generator.weights import RunPolicies

log = structlog.get_logger(__name__)

PROMPT_TABLES_MAX = 4
"""Prompt tables kept in memory: those of the runs and splits that jobs ask for in turn."""


def main() -> None:
    """Build the parts from the environment and serve the queue until told to stop."""
    settings = GeneratorSettings()
    configure_logs(settings, "generator")
    disable_progress_bar()
    worker_id = worker_identity(settings, WorkerRole.GENERATOR)
    orchestrator = OrchestratorClient(
        settings.orchestrator_url, settings.worker_token, ca_file=settings.ca_file
    )
    settings = connected(settings, orchestrator.connection)
    store = S3ObjectStore.connect(settings.store, retry_for_s=WORKER_RETRY_S)
    scratch = Scratch(settings.data_dir / "adapters", worker_id)
    vllm = VllmEngines(settings, scratch.folder) if settings.engine == "vllm" else None
    if vllm is not None:
        vllm.wait_for_server()
    speaker = ChatSpeaker(settings.queue)
    with RewardScorer() as scorer:
        scorer.warm_up()
        outbox = Outbox()
        generator = build(settings, worker_id, store, outbox, scorer, scratch.folder, vllm)
        handlers: dict[JobKind, Handler] = {
            JobKind.PREPARE: lambda context: prepare(
                context, store=store, models_dir=settings.model_cache_dir, scorer=scorer
            ),
            JobKind.GENERATE: lambda context: generate(context, generator),
            JobKind.EVALUATE: lambda context: evaluate(context, generator),
            JobKind.CHAT: lambda context: chat(context, generator.models, speaker),
        }
        if vllm is not None:
            handlers = {kind: vllm.checked(handler) for kind, handler in handlers.items()}
        runner = JobRunner(orchestrator, worker_id, handlers)
        chats = ChatLane(runner, speaker, settings.pool)
        presence = Presence(
            orchestrator,
            worker_id,
            WorkerRole.GENERATOR,
            settings.pool,
            settings.engine,
            generator.models.serving,
            outbox=outbox,
            data_dir=settings.data_dir,
        )
        presence.start()
        chats.start()
        log.info("The generator is ready.", worker=worker_id, threads=torch.get_num_threads())
        app = create_celery(settings.queue, "generator")
        departure = Departure(runner, presence, settings.grace_s)
        consume(app, runner, WorkerRole.GENERATOR, settings.pool, departure.begin)
        chats.stop()
        presence.stop()
        generator.models.close()
    scratch.close()


def build(
    settings: GeneratorSettings,
    worker_id: str,
    store: S3ObjectStore,
    outbox: Outbox,
    scorer: RewardScorer,
    adapters_dir: Path,
    vllm: VllmEngines | None,
) -> Generator:
    """The parts that jobs use; nothing is loaded and nothing has to answer yet."""
    proxy = WeightProxyClient(
        settings.weight_proxy_url, settings.worker_token, ca_file=settings.ca_file
    )

    def open_transformers(
        model: ModelSection, folder: Path, tokenizer: PreTrainedTokenizerBase
    ) -> Engine:
        base = LoraModel.open(folder, getattr(torch, model.dtype), device_of(settings.device))
        return TransformersEngine(base, tokenizer, settings.sequences_max)

    def open_model(model: ModelSection) -> BaseModel:
        folder = resolve_model(model, settings.model_cache_dir, store)
        tokenizer = load_tokenizer(folder, None)
        engine = (vllm.open if vllm else open_transformers)(model, folder, tokenizer)
        return BaseModel(
            engine=engine,
            tokenizer=tokenizer,
            new_policies=lambda run_id: RunPolicies(
                run_id,
                engine=engine,
                model=model,
                proxy=proxy,
                tell=outbox.add,
                folder=adapters_dir,
                spare_max=settings.adapters_max,
            ),
            positions_max=max_positions(folder),
        )

    @lru_cache(maxsize=PROMPT_TABLES_MAX)
    def prompts(key: str) -> list[PromptRow]:
        return decode_prompts(store.get(key))

    return Generator(
        store=store,
        prompts=prompts,
        models=BaseModels(open_model, settings.models_max),
        scorer=scorer,
        tell=outbox.add,
        worker_id=worker_id,
    )


if __name__ == "__main__":
    main()
