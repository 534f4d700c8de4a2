"""Adapters on a vLLM server, a fake one that really computes with them: wrong weights, and what
becomes of an adapter between load and unload."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
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
    NotFoundError,
    PermanentJobError,
    UnavailableError,
)
from services.generator.engines.vllm_command import AdapterLimits
from tests.fake_vllm import running_vllm
from tests.policies import Reference, policy_tensors, write_policy
from tests.servers import serve
from tests.vllm_engine import (
    GREEDY,
    ONE,
    PROMPT,
    VllmSetting,
    flat,
)


def test_w3_a_load_that_is_not_listed_is_refused(setting: VllmSetting) -> None:
    setting.fake.loads_lost = 1
    with pytest.raises(UnavailableError, match="vLLM took run-v1 but does not list it"):
        setting.engine.load("run-v1", setting.policy(1))
    assert setting.engine.loaded() == frozenset()
    with pytest.raises(NotFoundError):
        setting.engine.generate(ONE, "run-v1", GREEDY)
    setting.engine.load("run-v1", setting.policy(1))
    assert setting.engine.loaded() == {"run-v1"}


def test_w5_w6_the_adapter_that_a_request_names_changes_the_answer(setting: VllmSetting) -> None:
    setting.engine.load("run-v0", setting.policy(0))
    setting.engine.load("run-v1", setting.policy(1, step=1.0))
    base, far = (
        flat(setting.engine.generate(ONE, name, GREEDY))[0] for name in ("run-v0", "run-v1")
    )
    assert base.ids == Reference(setting.model_folder).greedy(PROMPT, 8)
    assert far.ids != base.ids
    assert [body["model"] for body in setting.fake.bodies] == ["run-v0", "run-v1"]


def test_w9_an_answer_in_another_name_is_refused(setting: VllmSetting) -> None:
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
    setting: VllmSetting, change: dict[str, Any], told: str | None
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


def test_w11_experts_of_a_mixture_are_refused(setting: VllmSetting) -> None:
    tensors = policy_tensors(1)
    for factor in ("lora_A", "lora_B"):
        tensors[f"base_model.model.model.layers.0.mlp.experts.0.up_proj.{factor}.weight"] = tensors[
            f"base_model.model.model.layers.0.self_attn.q_proj.{factor}.weight"
        ]
    folder = write_policy(setting.folder / "experts", tensors)
    with pytest.raises(IntegrityError, match=r"they differ in .*\.mlp\.experts\.0\.up_proj"):
        setting.engine.load("run-v1", folder)
    assert setting.fake.contents == []


def test_w13_values_that_are_not_finite_are_refused(setting: VllmSetting) -> None:
    tensors = policy_tensors(1)
    next(iter(tensors.values()))[0, 0] = float("nan")
    folder = write_policy(setting.folder / "nan", tensors)
    with pytest.raises(IntegrityError, match="values that are not finite"):
        setting.engine.load("run-v1", folder)
    assert setting.fake.contents == []


def test_l1_versions_in_use_are_not_evicted(setting: VllmSetting) -> None:
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


def test_l4_an_adapter_that_would_kill_the_server_is_never_sent(setting: VllmSetting) -> None:
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


def test_an_adapter_above_the_servers_rank_is_refused_here(setting: VllmSetting) -> None:
    engine = setting.another_engine(limits=AdapterLimits(max_loras=8, max_lora_rank=1))
    with pytest.raises(IntegrityError, match="has rank 2, vLLM takes 1: raise OFFBEAT_VLLM_MAX"):
        engine.load("run-v1", setting.policy(1))
    engine.close()


def test_l5_an_adapter_that_made_room_is_read_again_from_its_folder(setting: VllmSetting) -> None:
    setting.fake.max_cpu_loras = 1
    for version in (0, 1):
        setting.engine.load(f"run-v{version}", setting.policy(version, step=1.0))
    first = setting.engine.generate(ONE, "run-v0", GREEDY)
    assert setting.engine.generate(ONE, "run-v1", GREEDY) != first
    assert setting.engine.generate(ONE, "run-v0", GREEDY) == first
    assert setting.fake.reads["run-v0"] == 3
    assert setting.engine.loaded() == {"run-v0", "run-v1"}


def test_l6_loads_and_unloads_of_one_name_take_turns(setting: VllmSetting) -> None:
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


def test_l8_a_name_that_a_predecessor_left_is_loaded_anew(setting: VllmSetting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    successor = setting.another_engine()
    assert successor.loaded() == frozenset(), "what it did not prove it does not use"
    successor.load("run-v1", setting.policy(1))
    assert successor.loaded() == {"run-v1"}
    assert "run-v1" in setting.fake.unloads
    with pytest.raises(ConflictError, match="a name has one content"):
        successor.load("run-v1", setting.policy(2))
    successor.close()


def test_l9_a_restarted_server_has_lost_its_adapters(setting: VllmSetting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    setting.fake.restart()
    with pytest.raises(UnavailableError, match=r"`run-v1` does not exist.*vLLM was restarted"):
        setting.engine.generate(ONE, "run-v1", GREEDY)
    assert setting.engine.loaded() == frozenset()
    setting.engine.load("run-v1", setting.policy(1))
    setting.engine.generate(ONE, "run-v1", GREEDY)


def test_a_restarted_server_is_checked_again(setting: VllmSetting) -> None:
    setting.engine.load("run-v1", setting.policy(1))
    setting.fake.restart()
    setting.fake.logprobs_mode = "raw_logprobs"
    with pytest.raises(PermanentJobError, match="--logprobs-mode processed_logprobs"):
        setting.engine.loaded()


def test_l13_each_engine_talks_to_its_own_server(setting: VllmSetting) -> None:
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
