"""Chats over OpenAI's stock client: a real orchestrator, Valkey, weight-proxy and generator."""

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from offbeat.contracts.jobs import JobStatus
from offbeat.contracts.runs import RunStatus
from offbeat.contracts.weights import Canary
from offbeat.objects import S3ObjectStore
from tests.chat import HELLO, RENDERED, Setting, running_chat
from tests.policies import upload_policy
from tests.tiny_model import MAX_POSITIONS
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def setting(
    valkey_url: str,
    store: S3ObjectStore,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setting]:
    with running_chat(tmp_path_factory.mktemp("chat"), valkey_url, store, tiny_model) as setting:
        yield setting


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.PAUSED, RunStatus.SUCCEEDED])
def test_the_newest_version_answers_whatever_the_status_of_the_run(
    setting: Setting, status: RunStatus
) -> None:
    run_id = setting.new_run(status=status)
    answer = setting.client.chat.completions.create(
        model=run_id, messages=HELLO, temperature=0, max_tokens=24
    )
    assert answer.model == f"{run_id}@1"
    assert answer.object == "chat.completion"
    published = setting.proxy.client.version(run_id, 1)
    assert published is not None
    assert answer.system_fingerprint == published.manifest.adapter_sha256
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == setting.greedy(1, 24)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    prompt_tokens = len(setting.tokenizer(RENDERED).input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 24)
    assert answer.usage.total_tokens == prompt_tokens + 24
    wait_until(lambda: setting.jobs(run_id) == [(JobStatus.DONE, None)])


def test_a_stream_gives_the_same_text_in_pieces(setting: Setting) -> None:
    run_id = setting.new_run()
    chunks = list(
        setting.client.chat.completions.create(
            model=run_id,
            messages=HELLO,
            temperature=0,
            max_completion_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.model for chunk in chunks} == {f"{run_id}@1"}
    assert len({chunk.id for chunk in chunks}) == 1
    *texts, last, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in texts]
    assert "".join(pieces) == setting.greedy(1, 24)
    assert len(pieces) > 3
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 24


def test_the_events_of_a_stream_are_openais_to_the_letter(setting: Setting) -> None:
    run_id = setting.new_run()
    body = {"model": run_id, "messages": HELLO, "temperature": 0, "max_tokens": 1, "stream": True}
    response = setting.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith('data: {"id":"chatcmpl-')
    assert response.text.endswith(
        '"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}\n\n'
        "data: [DONE]\n\n"
    )
    assert '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' in (
        response.text
    )
    assert "usage" not in response.text


def test_a_version_that_is_named_answers_also_when_it_is_not_the_newest(setting: Setting) -> None:
    run_id = setting.new_run(versions=3)
    for version in (0, 2):
        answer = setting.client.chat.completions.create(
            model=f"{run_id}@{version}", messages=HELLO, temperature=0, max_tokens=8
        )
        assert answer.model == f"{run_id}@{version}"
        assert answer.choices[0].message.content == setting.greedy(version, 8)


def test_the_same_seed_gives_the_same_answer(setting: Setting) -> None:
    run_id = setting.new_run()
    texts = [
        setting.client.chat.completions.create(
            model=run_id, messages=HELLO, max_tokens=16, seed=seed, top_p=0.9
        )
        .choices[0]
        .message.content
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_answer_and_is_not_shown(setting: Setting) -> None:
    run_id = setting.new_run()
    whole = setting.greedy(1, 60)
    place = next(place for place in range(5, 50) if whole[place : place + 2].isascii())
    stop = whole[place : place + 2]
    answer = setting.client.chat.completions.create(
        model=run_id, messages=HELLO, temperature=0, max_tokens=60, stop=stop
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == whole[: whole.index(stop)]


def test_a_conversation_and_its_system_prompt_reach_the_template(setting: Setting) -> None:
    run_id = setting.new_run()
    answer = setting.client.chat.completions.create(
        model=run_id,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "1"}]},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3"},
        ],
        temperature=0,
        max_tokens=8,
    )
    prompt = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer.choices[0].message.content == setting.greedy(1, 8, prompt)


def test_two_are_answered_at_a_time(setting: Setting) -> None:
    run_ids = [setting.new_run(), setting.new_run()]
    setting.speaker.may_end.clear()
    streams = [
        setting.client.chat.completions.create(
            model=run_id, messages=HELLO, temperature=0, max_tokens=8, stream=True
        )
        for run_id in run_ids
    ]
    # Neither may end, yet both have begun.
    first = [next(stream) for stream in streams]
    assert [chunk.model for chunk in first] == [f"{run_id}@1" for run_id in run_ids]
    setting.speaker.may_end.set()
    for stream in streams:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == setting.greedy(1, 8)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_generator(setting: Setting, stream: bool) -> None:
    run_id = setting.new_run()
    engine = setting.engine
    made, ended = engine.num_tokens, engine.num_ended
    engine.permits = threading.Semaphore(6)
    body = {"model": run_id, "messages": HELLO, "temperature": 0, "max_tokens": 200}
    client = http.client.HTTPConnection(setting.orchestrator.url.removeprefix("http://"))
    client.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "stream": stream}),
        {"content-type": "application/json"},
    )
    wait_until(lambda: engine.num_tokens == made + 7)
    client.close()
    wait_until(lambda: setting.jobs(run_id) == [(JobStatus.CANCELLED, None)])
    while engine.num_ended == ended:
        engine.permits.release()
        time.sleep(0.01)
    engine.permits = None
    assert engine.num_tokens < made + 100


def test_a_conversation_that_is_too_long_for_the_model_is_a_mistake(setting: Setting) -> None:
    run_id = setting.new_run()
    with pytest.raises(openai.BadRequestError) as refused:
        setting.client.chat.completions.create(
            model=run_id, messages=[{"role": "user", "content": "x" * MAX_POSITIONS}]
        )
    assert f"the model has {MAX_POSITIONS} positions for messages and answer" in str(refused.value)
    wait_until(lambda: setting.jobs(run_id) == [(JobStatus.DONE, None)])


def test_the_answer_may_be_as_long_as_the_model_has_room(setting: Setting) -> None:
    run_id = setting.new_run()
    answer = setting.client.chat.completions.create(
        model=run_id, messages=HELLO, temperature=0, max_tokens=10_000
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_POSITIONS
    assert answer.choices[0].finish_reason == "length"


def test_a_version_that_is_not_what_was_trained_does_not_answer(setting: Setting) -> None:
    run_id = setting.new_run(versions=1)
    lie = Canary(
        prompt_ids=(1, 40, 41), completion_ids=(5, 6), logprobs=(-0.1, -0.1), parent_logprobs=()
    )
    setting.proxy.client.publish(upload_policy(setting.store, run_id, 1, lie))
    setting.set_version(run_id, 1)
    with pytest.raises(openai.InternalServerError) as refused:
        setting.client.chat.completions.create(model=f"{run_id}@1", messages=HELLO)
    assert refused.value.status_code == 503
    assert "the version is refused: its log-probabilities are off by" in str(refused.value)


def test_the_models_are_the_runs_that_can_be_talked_to(setting: Setting) -> None:
    silent, run_id = setting.new_run(versions=0), setting.new_run(versions=3)
    listed = {model.id: model.model_dump() for model in setting.client.models.list()}
    assert silent not in listed
    assert listed[run_id]["version"] == 2
    assert listed[run_id]["object"] == "model"
    assert setting.client.models.retrieve(f"{run_id}@1").id == f"{run_id}@1"
    with pytest.raises(openai.NotFoundError, match="has no version 3: the newest is 2"):
        setting.client.models.retrieve(f"{run_id}@3")
