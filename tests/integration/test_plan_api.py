"""`POST /v1/plan` of a real orchestrator, through the client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.plan import PlanOptions
from offbeat.errors import InvalidRequestError
from offbeat.objects import S3ObjectStore
from offbeat.plan.known_models import KNOWN
from offbeat.plan.report import make_plan
from offbeat.specs import validate_spec
from tests.orchestrator import Orchestrator, running_orchestrator
from tests.specs import spec_dict

SEVENTY = {"id": "meta-llama/Llama-2-70b-hf", "dtype": "bfloat16"}
TINY_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 258,
}


@pytest.fixture(scope="module")
def orchestrator(
    tmp_path_factory: pytest.TempPathFactory, valkey_url: str, store: S3ObjectStore
) -> Iterator[Orchestrator]:
    with running_orchestrator(tmp_path_factory.mktemp("plan"), valkey_url, store) as running:
        yield running


@pytest.fixture
def client(orchestrator: Orchestrator) -> Iterator[OffbeatClient]:
    with OffbeatClient(orchestrator.url) as client:
        yield client


def test_the_service_answers_what_the_formulas_say(client: OffbeatClient) -> None:
    spec = validate_spec(spec_dict(model=SEVENTY))
    options = PlanOptions(quantization="nf4", offload=True)
    answered = client.plan(spec, "2x24GB", 1, options)
    assert answered == make_plan(KNOWN["llama-2-70b"], spec, "2x24GB", 1, options)
    assert (answered.verdict, answered.settings.method) == ("fits", "qlora")


def test_a_model_that_is_not_known_is_described_by_its_config(client: OffbeatClient) -> None:
    spec = spec_dict(model={"id": "org/new-model"})
    with pytest.raises(InvalidRequestError, match="send it as `config`"):
        client.plan(spec, "1x24GB")
    answered = client.plan(spec, "1x24GB", config=TINY_CONFIG)
    assert (answered.model, answered.verdict) == ("org/new-model", "fits")


def test_the_service_reads_no_folder_of_its_own(client: OffbeatClient, tiny_model: Path) -> None:
    spec = spec_dict(model={"id": str(tiny_model)})
    with pytest.raises(InvalidRequestError, match="not known here"):
        client.plan(spec, "1x24GB")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"spec": spec_dict(model=SEVENTY), "gpus": "many"}, "write 2x24GB, 8xA100-80GB or 1xH100"),
        ({"spec": {"name": "empty"}, "gpus": "1x24GB"}, "model"),
        ({"spec": spec_dict(), "gpus": "1x24GB", "nodes": 0}, "nodes"),
        ({"spec": spec_dict(), "gpus": "1x24GB", "options": {"lora": 1}}, "lora"),
        ({"gpus": "1x24GB"}, "spec"),
    ],
)
def test_a_wrong_request_is_answered_with_what_to_mend(
    orchestrator: Orchestrator, body: dict[str, Any], named: str
) -> None:
    response = httpx.post(f"{orchestrator.url}/v1/plan", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert named in response.text
