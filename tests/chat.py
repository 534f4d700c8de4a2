"""A generator that answers chats beside a real orchestrator, and OpenAI's stock client."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import redis
from openai.types.chat import ChatCompletionMessageParam
from pydantic import SecretStr
from transformers import PreTrainedTokenizerBase

from offbeat.chat_channel import ChatSpeaker
from offbeat.contracts.chat import ChatFinished, ChatPiece
from offbeat.contracts.jobs import JobKind, JobStatus, WorkerRole
from offbeat.contracts.runs import RunStatus
from offbeat.models import load_tokenizer
from offbeat.objects import S3ObjectStore
from offbeat.outbox import Outbox
from offbeat.presence import Presence
from offbeat.settings import QueueSettings
from offbeat.worker import JobRunner
from offbeat.worker_api import OrchestratorClient
from services.generator.chat import chat
from services.generator.chat_lane import ChatLane
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)
from services.generator.models import BaseModel, BaseModels
from services.generator.weights import RunPolicies
from services.orchestrator.schema import JobRow, RunRow
from tests.orchestrator import Orchestrator, running_orchestrator, submit
from tests.policies import Reference, policy_tensors, upload_policy
from tests.specs import spec
from tests.tiny_engine import TinyEngine
from tests.tiny_model import MAX_POSITIONS
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy, running_proxy

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
POOL = "chat-tests"


class PacedEngine(TinyEngine):
    """Can be made to wait before each token of an answer."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.permits: threading.Semaphore | None = None
        self.num_tokens = 0
        """Made for answers."""
        self.num_ended = 0
        """Calls that came to an end, whatever the end."""

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
        def paced(ids: Sequence[int]) -> None:
            self.num_tokens += len(ids)
            on_tokens(ids)
            if self.permits is not None:
                self.permits.acquire()

        heard = on_tokens is not not_heard
        try:
            return super().generate(
                requests,
                policy,
                sampling,
                urgent=urgent,
                check=check,
                on_tokens=paced if heard else not_heard,
            )
        finally:
            self.num_ended += heard


class PatientSpeaker(ChatSpeaker):
    """Can be made to wait before it ends an answer."""

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings)
        self.may_end = threading.Event()
        self.may_end.set()

    def say(self, job_id: str, piece: ChatPiece) -> bool:
        if isinstance(piece, ChatFinished):
            assert self.may_end.wait(60)
        return super().say(job_id, piece)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An orchestrator, a generator that answers, and what a test may want of them."""

    orchestrator: Orchestrator
    proxy: RunningProxy
    store: S3ObjectStore
    engine: PacedEngine
    speaker: PatientSpeaker
    folder: Path
    http: httpx.Client
    client: openai.OpenAI

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder, None)

    def new_run(
        self, versions: int = 2, status: RunStatus = RunStatus.SUCCEEDED, pool: str = POOL
    ) -> str:
        """A run that has published so many versions and has this status."""
        run_id = submit(self.http, pool=pool)
        reference = Reference(self.folder)
        for version in range(versions):
            manifest = upload_policy(self.store, run_id, version, reference.canary(version))
            self.proxy.client.publish(manifest)
        with self.orchestrator.store.write() as session:
            session.query(RunRow).where(RunRow.id == run_id).one().status = status
        self.set_version(run_id, versions - 1 if versions else None)
        return run_id

    def set_version(self, run_id: str, version: int | None) -> None:
        """Have the orchestrator know of this version."""
        with self.orchestrator.store.write() as session:
            session.query(RunRow).where(RunRow.id == run_id).one().version = version

    def jobs(self, run_id: str) -> list[tuple[JobStatus, str | None]]:
        """Status and error of the run's chats."""
        with self.orchestrator.store.read() as session:
            rows = session.query(JobRow).where(JobRow.run_id == run_id, JobRow.kind == JobKind.CHAT)
            return [(row.status, row.error) for row in rows.order_by(JobRow.seq)]

    def greedy(self, version: int, num_tokens: int, prompt: str = RENDERED) -> str:
        """What this version answers, by PEFT's own arithmetic."""
        reference = Reference(self.folder, policy_tensors(version))
        ids = reference.greedy(self.tokenizer(prompt).input_ids, num_tokens)
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


@contextmanager
def running_chat(
    folder: Path, valkey_url: str, store: S3ObjectStore, tiny_model: Path
) -> Iterator[Setting]:
    """Everything that answers, with an empty broker; state lies in the folder."""
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    engine = PacedEngine(tiny_model)
    speaker = PatientSpeaker(QueueSettings(redis_url=SecretStr(valkey_url)))
    with (
        running_proxy(store, folder) as proxy,
        running_orchestrator(
            folder, valkey_url, store, clock=time.time, message_lost_s=15.0
        ) as orchestrator,
        running_generator(orchestrator, proxy, engine, speaker, tiny_model, folder / "adapters"),
        httpx.Client(base_url=orchestrator.url) as http,
        openai.OpenAI(base_url=f"{orchestrator.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield Setting(
            orchestrator=orchestrator,
            proxy=proxy,
            store=store,
            engine=engine,
            speaker=speaker,
            folder=tiny_model,
            http=http,
            client=client,
        )
    speaker.close()


@contextmanager
def running_generator(
    orchestrator: Orchestrator,
    proxy: RunningProxy,
    engine: PacedEngine,
    speaker: ChatSpeaker,
    model: Path,
    folder: Path,
) -> Iterator[None]:
    """The parts of a generator process that answer chats."""
    api = OrchestratorClient(orchestrator.url)
    outbox = Outbox()
    base = BaseModel(
        engine=engine,
        tokenizer=load_tokenizer(model, None),
        new_policies=lambda run_id: RunPolicies(
            run_id,
            engine=engine,
            model=spec().model,
            proxy=proxy.client,
            tell=outbox.add,
            folder=folder,
            spare_max=1,
        ),
        positions_max=MAX_POSITIONS,
    )
    models = BaseModels(lambda _: base, models_max=1)
    runner = JobRunner(
        api, "generator-1", {JobKind.CHAT: lambda context: chat(context, models, speaker)}
    )
    presence = Presence(
        api,
        "generator-1",
        WorkerRole.GENERATOR,
        POOL,
        engine.name,
        models.serving,
        outbox=outbox,
    )
    lane = ChatLane(runner, speaker, POOL)
    presence.start()
    lane.start()
    wait_until(lambda: bool(httpx.get(f"{orchestrator.url}/v1/workers").json()["data"]))
    yield
    lane.stop()
    presence.stop()
    models.close()
    runner.close()
    api.close()
