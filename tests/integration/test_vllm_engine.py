"""The vLLM engine over HTTP, against a fake server that really computes with the adapters."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from offbeat.errors import (
    LeaseLostError,
    OffbeatError,
    PermanentJobError,
    UnavailableError,
)
from services.generator.engines.base import SampleRequest, Sampling
from tests.fake_vllm import running_vllm
from tests.policies import Reference, policy_tensors
from tests.vllm_engine import (
    GREEDY,
    ONE,
    PROMPT,
    REQUESTS,
    SAMPLED,
    VllmSetting,
    flat,
)
from tests.waiting import wait_until


def test_ids_and_logprobs_are_those_of_the_policy(setting: VllmSetting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    reference = Reference(setting.model_folder, policy_tensors(2))
    completions = setting.engine.generate(REQUESTS, "run-v2", SAMPLED)
    assert [len(group) for group in completions] == [3, 1]
    for request, group in zip(REQUESTS, completions, strict=True):
        for completion in group:
            expected = reference.logprobs(request.prompt_ids, completion.ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert setting.engine.generate(REQUESTS, "run-v2", SAMPLED) == completions


def test_a_greedy_sample_carries_the_plain_distribution(setting: VllmSetting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    reference = Reference(setting.model_folder, policy_tensors(2))
    (completion,) = flat(setting.engine.generate(ONE, "run-v2", GREEDY))
    assert completion.ids == reference.greedy(PROMPT, 8)
    expected = reference.logprobs(PROMPT, completion.ids)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_each_sample_is_a_request_that_leaves_nothing_to_defaults(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    sampling = Sampling(max_new_tokens=2, temperature=0.5, top_k=9, top_p=0.8, stop=("ab", "c"))
    setting.engine.generate(REQUESTS, "run-v0", sampling)
    bodies = sorted(setting.fake.bodies, key=lambda body: body["seed"])
    assert [(body["seed"], body["prompt"]) for body in bodies] == [
        (7, list(PROMPT)),
        (8, list(PROMPT)),
        (9, [1, 60]),
        (2**62, list(PROMPT)),
    ]
    shared = {name: value for name, value in bodies[0].items() if name not in ("seed", "prompt")}
    assert shared == {
        "model": "run-v0",
        "n": 1,
        "max_tokens": 2,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["ab", "c"],
        "stop_token_ids": [0],
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "priority": 0,
    }


def test_a_stop_string_ends_a_sample(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    (free,) = flat(setting.engine.generate(ONE, "run-v0", GREEDY))
    reference = Reference(setting.model_folder)
    letter = setting.fake._engine._tokenizer.decode([free.ids[2]])
    assert isinstance(letter, str)
    sampling = Sampling(max_new_tokens=8, temperature=0.0, stop=(letter,))
    (stopped,) = flat(setting.engine.generate(ONE, "run-v0", sampling))
    assert (stopped.ids, stopped.finish_reason) == (free.ids[: len(stopped.ids)], "stop")
    assert stopped.ids == reference.greedy(PROMPT, len(stopped.ids))


def test_the_first_sample_is_heard_as_it_comes(setting: VllmSetting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    heard: list[int] = []
    streamed = setting.engine.generate(REQUESTS, "run-v2", SAMPLED, on_tokens=heard.extend)
    assert tuple(heard) == streamed[0][0].ids
    assert streamed == setting.engine.generate(REQUESTS, "run-v2", SAMPLED)


def test_urgent_work_has_a_higher_priority(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.engine.generate(ONE, "run-v0", GREEDY, urgent=True)
    setting.engine.generate(ONE, "run-v0", GREEDY)
    assert [body["priority"] for body in setting.fake.bodies] == [-1, 0]


def test_only_so_many_samples_are_under_way_at_once(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.running_most = 0
    requests = [SampleRequest(prompt_ids=PROMPT, seeds=tuple(range(20)))]
    assert len(flat(setting.engine.generate(requests, "run-v0", SAMPLED))) == 20
    assert 1 < setting.fake.running_most <= 4


def test_work_that_was_taken_away_is_aborted(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True

    def check() -> None:
        if setting.fake.running == 4:
            raise LeaseLostError("taken")

    with pytest.raises(LeaseLostError):
        setting.engine.generate(
            [SampleRequest(prompt_ids=PROMPT, seeds=tuple(range(9)))],
            "run-v0",
            SAMPLED,
            check=check,
        )
    wait_until(lambda: setting.fake.running == 0)
    assert setting.fake.aborted == 4
    assert len(setting.fake.bodies) == 4, "the others were never sent"


def test_closing_the_engine_ends_its_work(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(setting.engine.generate, ONE, "run-v0", SAMPLED)
        wait_until(lambda: setting.fake.running == 1)
        setting.engine.close()
        with pytest.raises(UnavailableError, match="the engine was closed"):
            working.result()
    wait_until(lambda: setting.fake.aborted == 1)


def test_a_server_that_hangs_is_given_up(setting: VllmSetting) -> None:
    engine = setting.another_engine(request_timeout_s=0.3)
    engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True
    with pytest.raises(UnavailableError, match="does not answer: ReadTimeout"):
        engine.generate(ONE, "run-v0", SAMPLED)
    engine.close()


def test_an_engine_that_dies_fails_what_is_in_flight(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(setting.engine.generate, REQUESTS, "run-v0", SAMPLED)
        wait_until(lambda: setting.fake.running == 4 or working.done())
        setting.fake.is_dead, setting.fake.hangs = True, False
        with pytest.raises(UnavailableError, match="EngineCore encountered an issue"):
            working.result()
    slow = setting.another_engine(start_timeout_s=0.1)
    with pytest.raises(UnavailableError, match="vLLM was not ready after 0 s"):
        slow.loaded()
    slow.close()


def test_a_server_that_is_gone_is_not_answering(setting: VllmSetting) -> None:
    with running_vllm(setting.model_folder) as (_, url):
        engine = setting.another_engine(url, start_timeout_s=0.1)
        engine.load("run-v0", setting.policy(0))
    with pytest.raises(UnavailableError, match="does not answer: ConnectError"):
        engine.generate(ONE, "run-v0", SAMPLED)
    with pytest.raises(UnavailableError, match="was not ready"):
        engine.loaded()
    engine.unload("run-v0")  # it went with the server
    engine.close()


@pytest.mark.parametrize(
    ("fault", "error", "told"),
    [
        ({"ends_with": "abort"}, UnavailableError, "vLLM ended a sample with 'abort'"),
        ({"tokens_max": 3}, PermanentJobError, "--generation-config vllm"),
        ({"fails_every": 1}, UnavailableError, "Internal server error"),
    ],
)
def test_odd_endings_are_no_samples(
    setting: VllmSetting, fault: dict[str, Any], error: type[OffbeatError], told: str
) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    for name, value in fault.items():
        setattr(setting.fake, name, value)
    with pytest.raises(error, match=told):
        setting.engine.generate(ONE, "run-v0", GREEDY)


def test_a_completion_that_does_not_fit_is_refused_before_it_is_cut(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    long = Sampling(max_new_tokens=250, temperature=1.0)
    with pytest.raises(PermanentJobError, match="do not fit into vLLM's --max-model-len 256"):
        setting.engine.generate(ONE, "run-v0", long)
    assert setting.fake.bodies == []
