"""`python -m services.trainer`: the composition root."""

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import structlog
import torch
from transformers.utils.logging import disable_progress_bar

from offbeat.connection import connected
from offbeat.contracts.jobs import JobKind, WorkerRole
from offbeat.contracts.run_spec import ModelSection
from offbeat.departure import Departure
from offbeat.devices import device_of
from offbeat.logs import configure_logs
from offbeat.models import is_stored, resolve_model, stored_at
from offbeat.objects import WORKER_RETRY_S, S3ObjectStore
from offbeat.presence import Presence
from offbeat.queue import create_celery
from offbeat.worker import JobRunner, consume, worker_identity
from offbeat.worker_api import OrchestratorClient, WeightProxyClient
from services.trainer import run
from services.trainer.memory import Memory
from services.trainer.publish import Trainer
from services.trainer.ranks import Ranks, own_device
from services.trainer.rollouts import RolloutFetcher
from services.trainer.settings import TrainerSettings
from services.trainer.sft_batch import example_tables
from services.trainer.sft_tokenize import tokenize
from services.trainer.versions import Versions
from services.trainer.weight_files import (
    OpenWeights,
    WeightFiles,
    weights_of_folder,
    weights_of_store,
)

log = structlog.get_logger(__name__)


def main() -> None:
    """Build the parts from the environment and serve the queue until told to stop."""
    settings = TrainerSettings()
    configure_logs(settings, "trainer")
    disable_progress_bar()
    make_deterministic()
    orchestrator = OrchestratorClient(
        settings.orchestrator_url, settings.worker_token, ca_file=settings.ca_file
    )
    settings = connected(settings, orchestrator.connection)
    device = own_device(device_of(settings.device))
    ranks = Ranks.join(device, settings.shard_ranks, settings.rank_timeout_s)
    trainer = build(settings, device, ranks)
    if ranks.rank > 0:
        follow(trainer.memory)
        return
    worker_id = worker_identity(settings, WorkerRole.TRAINER)
    runner = JobRunner(
        orchestrator,
        worker_id,
        {
            JobKind.TOKENIZE: lambda context: tokenize(context, trainer),
            JobKind.INIT: lambda context: run.init(context, trainer),
            JobKind.TRAIN: lambda context: run.train(context, trainer),
            JobKind.REPLAY: lambda context: run.replay(context, trainer),
        },
    )
    engine = f"torch {torch.__version__}"
    presence = Presence(
        orchestrator,
        worker_id,
        WorkerRole.TRAINER,
        settings.pool,
        engine,
        data_dir=settings.data_dir,
    )
    presence.start()
    log.info(
        "The trainer is ready.",
        worker=worker_id,
        ranks=ranks.size,
        threads=torch.get_num_threads(),
    )
    departure = Departure(runner, presence, settings.grace_s)
    app = create_celery(settings.queue, "trainer")
    consume(app, runner, WorkerRole.TRAINER, settings.pool, departure.begin)
    presence.stop()
    ranks.leave()


def follow(memory: Memory) -> None:
    """Compute with rank 0 until it leaves: signals are its business."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    log.info("The rank is ready.", rank=memory.ranks.rank, ranks=memory.ranks.size)
    memory.follow()


def build(settings: TrainerSettings, device: torch.device, ranks: Ranks) -> Trainer:
    """The real parts; nothing is loaded and nothing has to answer yet."""
    store = S3ObjectStore.connect(settings.store, retry_for_s=WORKER_RETRY_S)
    # Who holds a model in parts reads them where they lie.
    reads_folder = not ranks.divides(offload=settings.cpu_offload)
    proxy = WeightProxyClient(
        settings.weight_proxy_url, settings.worker_token, ca_file=settings.ca_file
    )
    return Trainer(
        store=store,
        versions=Versions(proxy),
        rollouts=RolloutFetcher(store),
        examples=example_tables(store),
        memory=Memory(
            lambda model: resolve_model(
                model, settings.model_cache_dir, store, stored_weights=reads_folder
            ),
            device,
            ranks,
            lambda model: weights_source(model, store),
            store,
            offload=settings.cpu_offload,
        ),
    )


def weights_source(model: ModelSection, store: S3ObjectStore) -> OpenWeights:
    """Where a rank reads its part of the model: from its folder, unless its weights have stayed in
    the store."""

    def open_weights(folder: Path) -> AbstractContextManager[WeightFiles]:
        if is_stored(model) and not any(folder.glob("*.safetensors")):
            return nullcontext(weights_of_store(*stored_at(model, store)))
        return weights_of_folder(folder)

    return open_weights


def make_deterministic() -> None:
    """The same step gives the same bytes, as far as the device has deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise torch also fills all fresh memory, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    main()
