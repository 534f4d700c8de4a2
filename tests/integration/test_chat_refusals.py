"""What a chat is told that gets no answer; a test plays the generator, or there is none."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from pydantic import SecretStr
from sqlalchemy import func, select

from offbeat.chat_channel import ChatSpeaker
from offbeat.client import OffbeatClient
from offbeat.contracts.chat import (
    ChatFinished,
    ChatInput,
    ChatMessage,
    ChatOutput,
    ChatStarted,
    ChatText,
)
from offbeat.contracts.jobs import JobKind, JobMessage, JobStatus
from offbeat.contracts.leases import CompleteRequest, FailRequest, Lease, LeaseRequest
from offbeat.contracts.runs import RunStatus
from offbeat.objects import S3ObjectStore
from offbeat.projects import Projects
from offbeat.settings import QueueSettings
from services.orchestrator.chats import CHATS_PER_RUN_MAX, KEPT_S, PICKUP_TIMEOUT_S
from services.orchestrator.schema import EventRow, JobRow, RunRow
from tests.chat import HELLO
from tests.orchestrator import (
    GENERATOR,
    SHA,
    Clock,
    Hand,
    Orchestrator,
    running_orchestrator,
    submit,
)
from tests.specs import spec_dict
from tests.waiting import wait_until

ADMIN_KEY, WORKER_TOKEN = "admin-key-0123456789", "worker-token-0123456789"


@pytest.fixture
def client(orchestrator: Orchestrator) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{orchestrator.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def speaker(valkey_url: str) -> Iterator[ChatSpeaker]:
    speaker = ChatSpeaker(QueueSettings(redis_url=SecretStr(valkey_url)))
    yield speaker
    speaker.close()


@pytest.fixture
def run_id(orchestrator: Orchestrator, http: httpx.Client) -> str:
    """A run that has succeeded with version 3, and a generator that is alive."""
    Hand(orchestrator).report(GENERATOR)
    run_id = submit(http)
    with orchestrator.store.write() as session:
        run = session.scalars(select(RunRow).where(RunRow.id == run_id)).one()
        run.version, run.status = 3, RunStatus.SUCCEEDED
    return run_id


def job_of(orchestrator: Orchestrator, run_id: str) -> tuple[JobStatus | None, str | None]:
    with orchestrator.store.read() as session:
        chats = select(JobRow).where(JobRow.run_id == run_id, JobRow.kind == JobKind.CHAT)
        job = session.scalars(chats.order_by(JobRow.seq.desc())).first()
        return (job.status, job.error) if job else (None, None)


def num_chats(orchestrator: Orchestrator, run_id: str) -> int:
    with orchestrator.store.read() as session:
        chats = select(func.count()).where(JobRow.run_id == run_id, JobRow.kind == JobKind.CHAT)
        return session.scalar(chats) or 0


def asking(client: openai.OpenAI, model: str) -> Callable[[], object]:
    return lambda: client.chat.completions.create(model=model, messages=HELLO)


def lease(orchestrator: Orchestrator, message: JobMessage | None) -> Lease:
    assert message is not None
    request = LeaseRequest(attempt=message.attempt, worker_id="hand")
    return orchestrator.worker.lease(message.job_id, request)


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [("@4", "has no version 4: the newest is 3"), ("x", "there is no run")],
)
def test_what_is_not_there_is_not_found(
    client: openai.OpenAI, run_id: str, suffix: str, reason: str
) -> None:
    with pytest.raises(openai.NotFoundError, match=reason) as refused:
        asking(client, run_id + suffix)()
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_a_run_without_versions_cannot_be_talked_to_yet(
    orchestrator: Orchestrator, http: httpx.Client, client: openai.OpenAI
) -> None:
    Hand(orchestrator).report(GENERATOR)
    with pytest.raises(openai.NotFoundError, match="has published no version yet"):
        asking(client, submit(http))()


def test_without_a_generator_the_reason_comes_at_once(
    orchestrator: Orchestrator, client: openai.OpenAI, run_id: str
) -> None:
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 3600
    with pytest.raises(openai.InternalServerError, match="no generator of pool") as refused:
        asking(client, run_id)()
    assert refused.value.status_code == 503
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_a_question_that_nobody_takes_is_given_up(
    orchestrator: Orchestrator, client: openai.OpenAI, run_id: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asking(client, run_id))
        wait_until(lambda: num_chats(orchestrator, run_id) == 1)
        assert isinstance(orchestrator.clock, Clock)
        orchestrator.clock.now += PICKUP_TIMEOUT_S + 1
        with pytest.raises(openai.InternalServerError, match="took the question within 30 s"):
            asked.result()
    assert job_of(orchestrator, run_id) == (JobStatus.CANCELLED, None)


def test_a_generator_that_fails_says_why_and_nothing_is_tried_again(
    orchestrator: Orchestrator, client: openai.OpenAI, speaker: ChatSpeaker, run_id: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asking(client, run_id))
        held = lease(orchestrator, speaker.take("default", 5))
        assert held.input == ChatInput(
            messages=(ChatMessage(role="user", content="hello"),),
            version=None,
            max_tokens=None,
            temperature=1.0,
            top_p=1.0,
            stop=(),
            seed=held.input.seed if isinstance(held.input, ChatInput) else 0,
        )
        failure = FailRequest(
            attempt=1, worker_id="hand", message="the engine is out of memory", permanent=False
        )
        orchestrator.worker.fail(held.job_id, failure)
        with pytest.raises(openai.InternalServerError, match="the engine is out of memory"):
            asked.result()
    assert job_of(orchestrator, run_id) == (JobStatus.FAILED, "the engine is out of memory")
    with orchestrator.store.read() as session:
        logged = session.scalars(select(EventRow.kind).where(EventRow.run_id == run_id)).all()
    assert not [kind for kind in logged if kind.startswith("job_")]


def test_a_run_that_ends_meanwhile_does_not_end_the_chat(
    orchestrator: Orchestrator,
    http: httpx.Client,
    client: openai.OpenAI,
    speaker: ChatSpeaker,
    run_id: str,
) -> None:
    with orchestrator.store.write() as session:
        session.scalars(select(RunRow).where(RunRow.id == run_id)).one().status = RunStatus.PAUSED
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: client.chat.completions.create(model=run_id, messages=HELLO))
        held = lease(orchestrator, speaker.take("default", 5))
        assert http.post(f"/v1/runs/{run_id}/cancel").json()["status"] == "cancelled"
        speaker.say(held.job_id, ChatStarted(version=3, adapter_sha256=SHA, prompt_tokens=5))
        speaker.say(held.job_id, ChatText(text="Well"))
        speaker.say(held.job_id, ChatFinished(finish_reason="stop", completion_tokens=2))
        request = CompleteRequest(
            attempt=1, worker_id="hand", output=ChatOutput(completion_tokens=2)
        )
        orchestrator.worker.complete(held.job_id, request)
        assert asked.result().choices[0].message.content == "Well"
    assert job_of(orchestrator, run_id) == (JobStatus.DONE, None)


def test_a_generator_that_dies_ends_the_stream_with_an_error(
    orchestrator: Orchestrator, client: openai.OpenAI, speaker: ChatSpeaker, run_id: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            lambda: client.chat.completions.create(model=run_id, messages=HELLO, stream=True)
        )
        held = lease(orchestrator, speaker.take("default", 5))
        speaker.say(held.job_id, ChatStarted(version=3, adapter_sha256=SHA, prompt_tokens=5))
        speaker.say(held.job_id, ChatText(text="Well"))
        stream = asked.result()
        assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "Well"]
        assert isinstance(orchestrator.clock, Clock)
        orchestrator.clock.now += 31
        with pytest.raises(openai.APIError, match="worker hand fell silent"):
            next(stream)
    assert job_of(orchestrator, run_id) == (JobStatus.FAILED, "worker hand fell silent")


def test_a_lost_end_is_noticed(
    orchestrator: Orchestrator, client: openai.OpenAI, speaker: ChatSpeaker, run_id: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asking(client, run_id))
        held = lease(orchestrator, speaker.take("default", 5))
        request = CompleteRequest(
            attempt=1, worker_id="hand", output=ChatOutput(completion_tokens=3)
        )
        orchestrator.worker.complete(held.job_id, request)
        with pytest.raises(openai.InternalServerError, match="the end of the answer was lost"):
            asked.result()


def test_a_run_answers_so_many_chats_at_once(
    orchestrator: Orchestrator, client: openai.OpenAI, run_id: str
) -> None:
    with ThreadPoolExecutor(CHATS_PER_RUN_MAX) as pool:
        for _ in range(CHATS_PER_RUN_MAX):
            pool.submit(asking(client, run_id))
        wait_until(lambda: num_chats(orchestrator, run_id) == CHATS_PER_RUN_MAX)
        with pytest.raises(openai.RateLimitError, match="answers 8 chats already") as refused:
            asking(client, run_id)()
        assert refused.value.response.headers["retry-after"] == "2"
        assert isinstance(orchestrator.clock, Clock)
        orchestrator.clock.now += PICKUP_TIMEOUT_S + 1


def test_old_turns_are_forgotten(
    orchestrator: Orchestrator, client: openai.OpenAI, speaker: ChatSpeaker, run_id: str
) -> None:
    assert isinstance(orchestrator.clock, Clock)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(asking(client, run_id))
            wait_until(lambda: job_of(orchestrator, run_id)[0] is JobStatus.QUEUED)
            orchestrator.clock.now += PICKUP_TIMEOUT_S + 1
            assert isinstance(asked.exception(), openai.InternalServerError)
        orchestrator.clock.now += KEPT_S
        Hand(orchestrator).report(GENERATOR)
    assert num_chats(orchestrator, run_id) == 1


def test_a_project_talks_to_its_own_runs_alone(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with running_orchestrator(
        tmp_path, valkey_url, store, api_key=ADMIN_KEY, worker_token=WORKER_TOKEN
    ) as running:
        with OffbeatClient(running.url, ADMIN_KEY) as admin:
            run_id = admin.submit(spec_dict()).id
            Projects(admin).create("theirs")
            key = Projects(admin).create_key("theirs", "test").secret
        with running.store.write() as session:
            session.scalars(select(RunRow).where(RunRow.id == run_id)).one().version = 3
        url = f"{running.url}/v1"
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as theirs:
            assert list(theirs.models.list()) == []
            for ask in (asking(theirs, run_id), lambda: theirs.models.retrieve(run_id)):
                with pytest.raises(openai.NotFoundError, match=f"there is no run '{run_id}'"):
                    ask()
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError, match="send a valid key") as refused,
        ):
            asking(stranger, run_id)()
        assert refused.value.code == "invalid_api_key"
