"""L12: what vLLM 0.32 truly answered, as Offbeat reads it, and as the fake server answers.

`tests/contracts/vllm-0.32/` holds requests and answers of a real server over the tiny model. A new
release is looked at by recording them again.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from offbeat.errors import IntegrityError, PermanentJobError, UnavailableError
from services.generator.engines.base import Completion, SampleRequest, Sampling, never_cancelled
from services.generator.engines.vllm_completions import complete, completion_bodies
from services.generator.engines.vllm_http import ServerAddress, VllmClient
from tests.fake_vllm import running_vllm
from tests.policies import policy_tensors, write_policy
from tests.servers import serve

RECORDED = Path(__file__).parents[1] / "contracts" / "vllm-0.32"
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)
REQUEST = SampleRequest(prompt_ids=(1, 20, 30, 40), seeds=(0,))


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text())


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> Iterator[VllmClient]:
    """A client of a server that gives the one recorded answer, whatever is asked."""
    answer = recorded(request.param)["response"]
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def reply(request: Request) -> Response:
        await request.body()
        if answer["content_type"] is None:
            return PlainTextResponse(answer["body"], answer["status"])
        return JSONResponse(answer["body"], answer["status"])

    with serve(app) as url:
        client = VllmClient(ServerAddress(url=url))
        yield client
        client.close()


def completed(client: VllmClient, sampling: Sampling = GREEDY) -> Completion:
    bodies = completion_bodies([REQUEST], "run-a-v0", sampling)
    (completion,) = complete(client.address, bodies, at_once=1, timeout_s=10, check=never_cancelled)
    return completion


@pytest.mark.parametrize("replay", ["completion-greedy"], indirect=True)
def test_l12_ids_and_logprobs_are_read(replay: VllmClient) -> None:
    assert completed(replay) == Completion(
        ids=(40, 48, 243, 251, 93, 243),
        logprobs=(
            *(-3.4267940521240234, -3.107381582260132, -2.347710132598877),
            *(-3.309920072555542, -2.0527889728546143, -2.903355836868286),
        ),
        finish_reason="length",
    )


@pytest.mark.parametrize("replay", ["completion-stop-string"], indirect=True)
def test_l12_a_sample_ends_with_the_token_that_completes_a_stop_string(
    replay: VllmClient,
) -> None:
    completion = completed(replay)
    assert (completion.ids, completion.finish_reason) == ((40, 48, 243, 251, 93), "stop")


@pytest.mark.parametrize("replay", ["completion-top-k-1"], indirect=True)
def test_l12_the_only_token_left_is_certain(replay: VllmClient) -> None:
    sampling = Sampling(max_new_tokens=4, temperature=1.0, top_k=1)
    assert completed(replay, sampling).logprobs == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("replay", "error"),
    [
        ("completion-unknown-model", UnavailableError),
        ("completion-folder-gone", UnavailableError),
        ("completion-nan-adapter", IntegrityError),
        ("completion-token-out-of-vocabulary", PermanentJobError),
    ],
    indirect=["replay"],
)
def test_l12_refusals_are_understood(replay: VllmClient, error: type[Exception]) -> None:
    with pytest.raises(error):
        completed(replay)


@pytest.mark.parametrize("replay", ["models-with-adapter"], indirect=True)
def test_l12_models_are_read(replay: VllmClient) -> None:
    base, adapter = replay.models()
    assert (base.id, base.parent, base.max_model_len) == ("base", None, 256)
    assert (adapter.id, adapter.parent, adapter.root) == ("run-a-v0", "base", "/adapters/v0")


@pytest.mark.parametrize("replay", ["version"], indirect=True)
def test_l12_the_version_is_read(replay: VllmClient) -> None:
    assert replay.version() == "0.32.0"


@pytest.mark.parametrize("replay", ["load"], indirect=True)
def test_l12_a_load_is_acknowledged_without_json(replay: VllmClient) -> None:
    replay.load("run-a-v0", Path("/adapters/v0"))


@pytest.mark.parametrize(
    ("replay", "error"),
    [
        ("load-path-missing", UnavailableError),
        ("load-rank-too-high", IntegrityError),
        ("load-name-taken", IntegrityError),
        ("load-foreign-module", UnavailableError),
    ],
    indirect=["replay"],
)
def test_l12_refused_loads_are_understood(replay: VllmClient, error: type[Exception]) -> None:
    with pytest.raises(error):
        replay.load("a", Path("/adapters/a"))


@pytest.mark.parametrize("replay", ["unload-unknown"], indirect=True)
def test_l12_unloading_what_is_not_there_is_fine(replay: VllmClient) -> None:
    replay.unload("nobody")


def test_the_fake_answers_as_vllm_did(tiny_model: Path, tmp_path: Path) -> None:
    """The same status, keys and words, where adapters and paths have the same names."""
    folder = write_policy(tmp_path / "v0", policy_tensors(0))
    with (
        running_vllm(tiny_model, served_name="base", max_lora_rank=1) as (fake, url),
        httpx.Client(base_url=url) as http,
    ):

        def answer(name: str, **changes: Any) -> tuple[Any, Any]:
            was = recorded(name)
            request, response = was["request"], was["response"]
            # What a real server fills in, the fake has to be told: Offbeat always sends it.
            defaults = {"top_k": 0, "top_p": 1.0, "stop": [], "seed": 0, "priority": 0}
            is_completion = request["path"] == "/v1/completions"
            body = {**(defaults if is_completion else {}), **(request["json"] or {}), **changes}
            now = http.request(request["method"], request["path"], json=body)
            is_json = response["content_type"] is not None
            assert now.status_code == response["status"]
            return (now.json() if is_json else now.text), response["body"]

        assert answer("version")[0] == {"version": "0.32.0"}
        now, then = answer("load-rank-too-high", lora_path=str(folder))
        assert now["error"]["message"].startswith("Call to add_lora method failed: Worker failed")
        assert now["error"].keys() == then["error"].keys()
        fake.max_lora_rank = 64
        for name in ("load", "load-name-taken"):
            now, then = answer(name, lora_path=str(folder))
            assert now == then
        for name in ("load-path-missing", "unload-unknown", "completion-unknown-model"):
            now, then = answer(name)
            assert now == then
        now, then = answer("models-with-adapter")
        assert [card.keys() for card in now["data"]] == [card.keys() for card in then["data"]]
        now, then = answer("completion-greedy")
        assert now.keys() == then.keys()
        assert now["choices"][0].keys() == then["choices"][0].keys()
        assert now["choices"][0]["logprobs"].keys() == then["choices"][0]["logprobs"].keys()
        assert now["usage"] == then["usage"]
        fake.roots["e-v0"] = tmp_path / "gone"
        now, then = answer("completion-folder-gone")
        assert now == then
