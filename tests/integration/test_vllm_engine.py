"""The vLLM engine over HTTP, against a fake server that really computes with the adapters."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offbeat.errors import (
    ConflictError,
    IntegrityError,
    LeaseLostError,
    NotFoundError,
    OffbeatError,
    PermanentJobError,
    UnavailableError,
)
from services.generator.engines.base import Completion, SampleRequest, Sampling
from services.generator.engines.vllm import VllmEngine
from services.generator.engines.vllm_command import AdapterLimits
from tests.fake_vllm import FakeVllm, running_vllm
from tests.policies import Reference, policy_tensors, write_policy
from tests.servers import serve
from tests.vllm_engine import vllm_engine
from tests.waiting import wait_until

SAMPLED = Sampling(max_new_tokens=8, temperature=1.0)
GREEDY = Sampling(max_new_tokens=8, temperature=0.0)
PROMPT = (1, 40, 41, 42, 0, 1, 50)
REQUESTS = [
    SampleRequest(prompt_ids=PROMPT, seeds=(7, 8, 2**62)),
    SampleRequest(prompt_ids=(1, 60), seeds=(9,)),
]
ONE = [SampleRequest(prompt_ids=PROMPT, seeds=(0,))]


@dataclass(kw_only=True)
class Setting:
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


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[tuple[FakeVllm, str]]:
    with running_vllm(tiny_model) as running:
        yield running


@pytest.fixture
def setting(server: tuple[FakeVllm, str], tiny_model: Path, tmp_path: Path) -> Iterator[Setting]:
    """A server without faults, and an engine that has checked it."""
    fake, url = server
    fake.reset()
    fake.model_folder = tiny_model
    engine = vllm_engine(url, tiny_model, tmp_path)
    assert engine.loaded() == frozenset()
    fake.bodies.clear()
    fake.contents.clear()
    fake.unloads.clear()
    yield Setting(fake=fake, url=url, engine=engine, model_folder=tiny_model, folder=tmp_path)
    engine.close()
    # A request that was given up must not end within the next test's count.
    fake.hangs = False
    wait_until(lambda: fake.running == 0)


def flat(completions: list[list[Completion]]) -> list[Completion]:
    return [completion for group in completions for completion in group]


# -- completions -----------------------------------------------------------------------------------


def test_ids_and_logprobs_are_those_of_the_policy(setting: Setting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    reference = Reference(setting.model_folder, policy_tensors(2))
    completions = setting.engine.generate(REQUESTS, "run-v2", SAMPLED)
    assert [len(group) for group in completions] == [3, 1]
    for request, group in zip(REQUESTS, completions, strict=True):
        for completion in group:
            expected = reference.logprobs(request.prompt_ids, completion.ids)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    assert setting.engine.generate(REQUESTS, "run-v2", SAMPLED) == completions


def test_a_greedy_sample_carries_the_plain_distribution(setting: Setting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    reference = Reference(setting.model_folder, policy_tensors(2))
    (completion,) = flat(setting.engine.generate(ONE, "run-v2", GREEDY))
    assert completion.ids == reference.greedy(PROMPT, 8)
    expected = reference.logprobs(PROMPT, completion.ids)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_each_sample_is_a_request_that_leaves_nothing_to_defaults(setting: Setting) -> None:
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


def test_a_stop_string_ends_a_sample(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    (free,) = flat(setting.engine.generate(ONE, "run-v0", GREEDY))
    reference = Reference(setting.model_folder)
    letter = setting.fake._engine._tokenizer.decode([free.ids[2]])
    assert isinstance(letter, str)
    sampling = Sampling(max_new_tokens=8, temperature=0.0, stop=(letter,))
    (stopped,) = flat(setting.engine.generate(ONE, "run-v0", sampling))
    assert (stopped.ids, stopped.finish_reason) == (free.ids[: len(stopped.ids)], "stop")
    assert stopped.ids == reference.greedy(PROMPT, len(stopped.ids))


def test_the_first_sample_is_heard_as_it_comes(setting: Setting) -> None:
    setting.engine.load("run-v2", setting.policy(2))
    heard: list[int] = []
    streamed = setting.engine.generate(REQUESTS, "run-v2", SAMPLED, on_tokens=heard.extend)
    assert tuple(heard) == streamed[0][0].ids
    assert streamed == setting.engine.generate(REQUESTS, "run-v2", SAMPLED)


def test_urgent_work_has_a_higher_priority(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.engine.generate(ONE, "run-v0", GREEDY, urgent=True)
    setting.engine.generate(ONE, "run-v0", GREEDY)
    assert [body["priority"] for body in setting.fake.bodies] == [-1, 0]


def test_only_so_many_samples_are_under_way_at_once(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.running_most = 0
    requests = [SampleRequest(prompt_ids=PROMPT, seeds=tuple(range(20)))]
    assert len(flat(setting.engine.generate(requests, "run-v0", SAMPLED))) == 20
    assert 1 < setting.fake.running_most <= 4


def test_work_that_was_taken_away_is_aborted(setting: Setting) -> None:
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


def test_closing_the_engine_ends_its_work(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(setting.engine.generate, ONE, "run-v0", SAMPLED)
        wait_until(lambda: setting.fake.running == 1)
        setting.engine.close()
        with pytest.raises(UnavailableError, match="the engine was closed"):
            working.result()
    wait_until(lambda: setting.fake.aborted == 1)


# -- a server in trouble ---------------------------------------------------------------------------


def test_a_server_that_hangs_is_given_up(setting: Setting) -> None:
    engine = setting.another_engine(request_timeout_s=0.3)
    engine.load("run-v0", setting.policy(0))
    setting.fake.hangs = True
    with pytest.raises(UnavailableError, match="does not answer: ReadTimeout"):
        engine.generate(ONE, "run-v0", SAMPLED)
    engine.close()


def test_an_engine_that_dies_fails_what_is_in_flight(setting: Setting) -> None:
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


def test_a_server_that_is_gone_is_not_answering(setting: Setting, tmp_path: Path) -> None:
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
    setting: Setting, fault: dict[str, Any], error: type[OffbeatError], told: str
) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    for name, value in fault.items():
        setattr(setting.fake, name, value)
    with pytest.raises(error, match=told):
        setting.engine.generate(ONE, "run-v0", GREEDY)


def test_a_completion_that_does_not_fit_is_refused_before_it_is_cut(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    long = Sampling(max_new_tokens=250, temperature=1.0)
    with pytest.raises(PermanentJobError, match="do not fit into vLLM's --max-model-len 256"):
        setting.engine.generate(ONE, "run-v0", long)
    assert setting.fake.bodies == []


# -- wrong weights ---------------------------------------------------------------------------------


def test_w3_a_load_that_is_not_listed_is_refused(setting: Setting) -> None:
    setting.fake.loads_lost = 1
    with pytest.raises(UnavailableError, match="vLLM took run-v1 but does not list it"):
        setting.engine.load("run-v1", setting.policy(1))
    assert setting.engine.loaded() == frozenset()
    with pytest.raises(NotFoundError):
        setting.engine.generate(ONE, "run-v1", GREEDY)
    setting.engine.load("run-v1", setting.policy(1))
    assert setting.engine.loaded() == {"run-v1"}


def test_w5_w6_the_adapter_that_a_request_names_changes_the_answer(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.engine.load("run-v1", setting.policy(1, step=1.0))
    base, far = (
        flat(setting.engine.generate(ONE, name, GREEDY))[0] for name in ("run-v0", "run-v1")
    )
    assert base.ids == Reference(setting.model_folder).greedy(PROMPT, 8)
    assert far.ids != base.ids
    assert [body["model"] for body in setting.fake.bodies] == ["run-v0", "run-v1"]


def test_w9_an_answer_in_another_name_is_refused(setting: Setting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    setting.fake.answers_as = "tiny"
    with pytest.raises(IntegrityError, match="asked for run-v1 and answered as tiny"):
        setting.engine.generate(ONE, "run-v1", GREEDY)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, None),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, None),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_w10_only_plain_lora_on_inner_layers_reaches_the_server(
    setting: Setting, change: dict[str, Any], told: str | None
) -> None:
    folder = write_policy(setting.folder / "odd", policy_tensors(1))
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, **change}))
    if told is None:  # PEFT would have saved factors for the target
        name = change["target_modules"][-1]
        tensors = policy_tensors(1)
        for factor in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{factor}.weight"] = tensors.pop(
                f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.weight"
            )
        write_policy(setting.folder / "odder", tensors)
        (setting.folder / "odder" / ADAPTER_WEIGHTS).replace(folder / ADAPTER_WEIGHTS)
    with pytest.raises(IntegrityError, match=told or "they differ in"):
        setting.engine.load("run-v1", folder)
    assert setting.fake.contents == []


def test_w11_experts_of_a_mixture_are_refused(setting: Setting) -> None:
    tensors = policy_tensors(1)
    for factor in ("lora_A", "lora_B"):
        tensors[f"base_model.model.model.layers.0.mlp.experts.0.up_proj.{factor}.weight"] = tensors[
            f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.weight"
        ]
    folder = write_policy(setting.folder / "experts", tensors)
    with pytest.raises(IntegrityError, match=r"they differ in .*\.mlp\.experts\.0\.up_proj"):
        setting.engine.load("run-v1", folder)
    assert setting.fake.contents == []


def test_w13_values_that_are_not_finite_are_refused(setting: Setting) -> None:
    tensors = policy_tensors(1)
    next(iter(tensors.values()))[0, 0] = float("nan")
    folder = write_policy(setting.folder / "nan", tensors)
    with pytest.raises(IntegrityError, match="values that are not finite"):
        setting.engine.load("run-v1", folder)
    assert setting.fake.contents == []


# -- the life of an adapter ------------------------------------------------------------------------


def test_l1_versions_in_use_are_not_evicted(setting: Setting) -> None:
    """At max_versions + 2 places each adapter is read once; at one less vLLM goes round in them."""
    max_versions = 4
    for places, reads in ((max_versions + 2, 1), (max_versions + 1, 3)):
        setting.fake.restart()
        setting.fake.max_cpu_loras = places
        engine = setting.another_engine()
        setting.fake.reads.clear()
        engine.loaded()
        setting.fake._cache.clear()
        names = [f"run-{places}-v{version}" for version in range(max_versions + 2)]
        for version, name in enumerate(names):
            engine.load(name, setting.policy(version))
        for _ in range(2):
            for name in names:
                engine.generate(ONE, name, GREEDY)
        assert {setting.fake.reads[name] for name in names} == {reads}
        engine.close()


def test_l4_an_adapter_that_would_kill_the_server_is_never_sent(setting: Setting) -> None:
    """vLLM takes wrong shapes and missing layers without a word; others it opens at first use."""
    good = setting.policy(1)
    weights = (good / ADAPTER_WEIGHTS).read_bytes()
    bad = {
        "missing": None,
        "truncated": weights[: len(weights) // 2],
        "shapes": write_policy(
            setting.folder / "s", {k: v[:, :1] for k, v in policy_tensors(1).items()}
        ),
        "layer-7": write_policy(
            setting.folder / "l",
            {k.replace("layers.1.", "layers.7."): v for k, v in policy_tensors(1).items()},
        ),
    }
    for name, content in bad.items():
        folder = setting.folder / f"bad-{name}"
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_bytes((good / ADAPTER_CONFIG).read_bytes())
        if isinstance(content, Path):
            content = (content / ADAPTER_WEIGHTS).read_bytes()
        if content is not None:
            (folder / ADAPTER_WEIGHTS).write_bytes(content)
        with pytest.raises(IntegrityError):
            setting.engine.load(f"run-{name}", folder)
    with pytest.raises(IntegrityError):
        setting.engine.load("run-nowhere", setting.folder / "nowhere")
    assert setting.fake.contents == []
    assert not setting.fake.is_dead


def test_an_adapter_above_the_servers_rank_is_refused_here(setting: Setting) -> None:
    engine = setting.another_engine(limits=AdapterLimits(max_loras=8, max_lora_rank=1))
    with pytest.raises(IntegrityError, match="has rank 2, vLLM takes 1: raise OFFBEAT_VLLM_MAX"):
        engine.load("run-v1", setting.policy(1))
    engine.close()


def test_l5_an_adapter_that_made_room_is_read_again_from_its_folder(setting: Setting) -> None:
    setting.fake.max_cpu_loras = 1
    for version in (0, 1):
        setting.engine.load(f"run-v{version}", setting.policy(version, step=1.0))
    first = setting.engine.generate(ONE, "run-v0", GREEDY)
    assert setting.engine.generate(ONE, "run-v1", GREEDY) != first
    assert setting.engine.generate(ONE, "run-v0", GREEDY) == first
    assert setting.fake.reads["run-v0"] == 3
    assert setting.engine.loaded() == {"run-v0", "run-v1"}


def test_l6_loads_and_unloads_of_one_name_take_turns(setting: Setting) -> None:
    names = ["run-a", "run-b", "run-c"]
    folder = setting.policy(1)

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(6):
            name = generator.choice(names)
            if generator.random() < 0.5:
                setting.engine.unload(name)
            else:
                try:
                    setting.engine.load(name, folder)
                except ConflictError:
                    continue  # another thread was first

    with ThreadPoolExecutor(20) as pool:
        for done in [pool.submit(work, seed) for seed in range(20)]:
            done.result()
    assert setting.engine.loaded() == set(setting.fake.roots)
    for name in names:
        setting.engine.unload(name)
        setting.engine.load(name, folder)
    assert setting.engine.loaded() == set(names) == set(setting.fake.roots)


def test_l8_a_name_that_a_predecessor_left_is_loaded_anew(setting: Setting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    successor = setting.another_engine()
    assert successor.loaded() == frozenset(), "what it did not prove it does not use"
    successor.load("run-v1", setting.policy(1))
    assert successor.loaded() == {"run-v1"}
    assert "run-v1" in setting.fake.unloads
    with pytest.raises(ConflictError, match="a name has one content"):
        successor.load("run-v1", setting.policy(2))
    successor.close()


def test_l9_a_restarted_server_has_lost_its_adapters(setting: Setting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    setting.fake.restart()
    with pytest.raises(UnavailableError, match=r"`run-v1` does not exist.*vLLM was restarted"):
        setting.engine.generate(ONE, "run-v1", GREEDY)
    assert setting.engine.loaded() == frozenset()
    setting.engine.load("run-v1", setting.policy(1))
    setting.engine.generate(ONE, "run-v1", GREEDY)


def test_a_restarted_server_is_checked_again(setting: Setting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    setting.fake.restart()
    setting.fake.logprobs_mode = "raw_logprobs"
    with pytest.raises(PermanentJobError, match="--logprobs-mode processed_logprobs"):
        setting.engine.loaded()


def test_l13_each_engine_talks_to_its_own_server(setting: Setting) -> None:
    with running_vllm(setting.model_folder) as (other, other_url):
        second = setting.another_engine(other_url)
        for engine in (setting.engine, second):
            engine.load("run-v1", setting.policy(1))
        assert list(setting.fake.roots) == list(other.roots) == ["run-v1"]
        with serve(balancer([setting.url, other_url])) as url:
            both = setting.another_engine(url)
            with pytest.raises(UnavailableError, match=r"does not (list it|exist)"):
                both.load("run-v2", setting.policy(2))
            both.close()
        second.close()


def balancer(urls: list[str]) -> FastAPI:
    """Hands requests round."""
    app, turns = FastAPI(), cycle(urls)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(headers=headers) as http:
            body = await request.body()
            answer = await http.request(request.method, f"{next(turns)}/{path}", content=body)
        return Response(answer.content, answer.status_code)

    return app


# -- the checks at the start -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"version": "0.11.2"}, "vLLM 0.11.2 is too old"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"served_name": "base", "model_folder": Path("/other")}, "--served-model-name tiny"),
        ({"has_lora_routes": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"lora_enabled": False}, "--enable-lora"),
        ({"max_loras": 4}, "--max-loras 8, or set OFFBEAT_VLLM_MAX_LORAS=4"),
        ({"has_priorities": False}, "--scheduling-policy priority"),
        ({"api_key": "secret"}, "OFFBEAT_VLLM_API_KEY"),
    ],
)
def test_a_wrong_flag_is_named(setting: Setting, fault: dict[str, Any], told: str) -> None:
    for name, value in fault.items():
        setattr(setting.fake, name, value)
    engine = setting.another_engine()
    with pytest.raises(PermanentJobError, match=told):
        engine.load("run-v0", setting.policy(0))
    engine.close()


def test_a_rank_that_the_server_does_not_take_is_named(setting: Setting) -> None:
    setting.fake.max_lora_rank = 8
    engine = setting.another_engine()
    with pytest.raises(
        IntegrityError, match=r"16 is greater than max_lora_rank 8.*--max-lora-rank"
    ):
        engine.loaded()
    engine.close()


def test_the_checks_leave_nothing_behind(setting: Setting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    assert list(setting.fake.roots) == ["run-v0"]
    assert list(setting.folder.iterdir()) == [setting.policy(0)]


def test_a_server_with_a_key_is_given_it(setting: Setting) -> None:
    setting.fake.api_key = "secret"
    engine = setting.another_engine(api_key="secret")
    engine.load("run-v0", setting.policy(0))
    assert len(flat(engine.generate(REQUESTS, "run-v0", SAMPLED))) == 4
    engine.close()


def test_a_server_that_is_starting_is_waited_for(setting: Setting) -> None:
    setting.fake.starting = True
    engine = setting.another_engine(start_timeout_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(engine.load, "run-v0", setting.policy(0))
        assert not loading.done()
        setting.fake.starting = False
        loading.result()
    assert engine.loaded() == {"run-v0"}
    engine.close()
