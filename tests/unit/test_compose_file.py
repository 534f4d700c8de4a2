"""`docker-compose.yml` keeps to the names of the code, and to what is promised of containers."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from scripts.env_example import SETTINGS, compose_defaults, variables
from services.generator.engines.vllm_checks import VERSION_TESTED
from services.generator.engines.vllm_command import SERVER_ENVIRONMENT
from tests.vllm_flags import OF_THE_PLACE, flags, needed

OWN_IMAGES = ("offbeat-control:", "offbeat-generator:", "offbeat-trainer:")
THREADS = "OMP_NUM_THREADS"
SECRETS_DIR = "OFFBEAT_SECRETS_DIR"
HUB_TOKEN = "hf_token"
HUB_TOKEN_PATH = "HF_TOKEN_PATH"
HEALTHY = "service_healthy"
DONE = "service_completed_successfully"
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


class Dependency(BaseModel):
    """What is waited for."""

    condition: str


class Service(BaseModel):
    """What the tests look at."""

    model_config = ConfigDict(extra="ignore")

    image: str
    environment: dict[str, str] = {}
    secrets: list[str] = []
    ports: list[str] = []
    restart: str = "no"
    read_only: bool = False
    cap_drop: list[str] = []
    init: bool = False
    mem_limit: str | None = None
    depends_on: dict[str, Dependency] = {}
    command: str | list[str] = []

    @property
    def is_own(self) -> bool:
        return self.image.startswith(OWN_IMAGES)


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    described = yaml.safe_load(Path("docker-compose.yml").read_text())["services"]
    return {name: Service.model_validate(service) for name, service in described.items()}


def _known() -> set[str]:
    return {variable for settings in SETTINGS for variable, _ in variables(settings)}


def test_every_setting_that_a_service_is_given_is_one(services: dict[str, Service]) -> None:
    given = {name for each in services.values() if each.is_own for name in each.environment}
    assert given - _known() == {SECRETS_DIR, THREADS, HUB_TOKEN_PATH}


def test_every_secret_of_a_service_is_a_setting_and_in_no_environment(
    services: dict[str, Service],
) -> None:
    for service in services.values():
        if service.is_own:
            names = {name.upper() for name in service.secrets if name != HUB_TOKEN}
            assert names <= _known()
            assert names.isdisjoint(service.environment)


def test_what_fetches_models_has_the_token_of_the_hub(services: dict[str, Service]) -> None:
    having = {name for name, service in services.items() if HUB_TOKEN in service.secrets}
    assert having == {"generator", "trainer", "vllm", "generator-vllm", "trainer-gpu"}
    for name in having:
        assert services[name].environment[HUB_TOKEN_PATH] == f"/run/secrets/{HUB_TOKEN}"


def test_the_script_makes_every_secret() -> None:
    described = yaml.safe_load(Path("docker-compose.yml").read_text())["secrets"]
    script = Path("deploy/compose/secrets.sh").read_text()
    assert [name for name in described if f"secret {name} " not in script] == []
    assert {secret["file"] for secret in described.values()} == {
        f"deploy/compose/secrets/{name}" for name in described
    }


def test_the_images_are_of_this_version() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    defaults = compose_defaults(Path("docker-compose.yml").read_text())
    assert defaults["OFFBEAT_VERSION"] == project["version"]


def test_only_the_orchestrator_is_published_and_on_loopback(services: dict[str, Service]) -> None:
    published = {name: service.ports for name, service in services.items() if service.ports}
    assert published == {"orchestrator": ["${OFFBEAT_PUBLISH:-127.0.0.1:8000}:8000"]}


def test_own_services_hold_no_rights_and_write_to_volumes_only(
    services: dict[str, Service],
) -> None:
    for name, service in services.items():
        if service.is_own:
            assert service.read_only, name
            assert service.cap_drop == ["ALL"], name


def test_what_runs_has_a_limit_of_memory(services: dict[str, Service]) -> None:
    assert {name for name, service in services.items() if service.mem_limit is None} == {"rclone"}


def test_each_service_waits_until_what_it_needs_is_healthy_or_done(
    services: dict[str, Service],
) -> None:
    nothing: dict[str, str] = {}
    store = {"minio": HEALTHY}
    worker = {"orchestrator": HEALTHY, "weight-proxy": HEALTHY, "redis": HEALTHY}
    prepared = {"migrations": DONE, "bucket": DONE}
    waits = {
        name: {other: each.condition for other, each in service.depends_on.items()}
        for name, service in services.items()
    }
    assert waits == {
        **dict.fromkeys(("minio", "postgres", "redis", "vllm"), nothing),
        "migrations": {"postgres": HEALTHY},
        **dict.fromkeys(("bucket", "rclone"), store),
        "orchestrator": {**prepared, "redis": HEALTHY},
        "weight-proxy": prepared,
        **dict.fromkeys(("generator", "trainer", "trainer-gpu"), worker),
        "generator-vllm": {**worker, "vllm": HEALTHY},
    }


def test_what_serves_is_started_again_and_what_is_a_job_is_tried_a_few_times(
    services: dict[str, Service],
) -> None:
    assert {name: service.restart for name, service in services.items()} == {
        **dict.fromkeys(services, "unless-stopped"),
        "bucket": "on-failure:5",
        "migrations": "on-failure:5",
        "rclone": "no",
    }


def test_every_pulled_image_has_a_stand_in_but_vllm_s(services: dict[str, Service]) -> None:
    offline = yaml.safe_load(Path("deploy/compose/offline.yaml").read_text())["services"]
    pulled = {name for name, service in services.items() if not service.is_own}
    assert pulled == {*offline, "vllm"}
    assert all(set(service) == {"image"} for service in offline.values())


def test_pulled_images_are_pinned_by_digest_and_vllm_is_the_one_that_is_tested(
    services: dict[str, Service],
) -> None:
    pulled = {name: service.image for name, service in services.items() if not service.is_own}
    major, minor = VERSION_TESTED
    assert VARIABLE.sub(r"\1", pulled.pop("vllm")) == f"vllm/vllm-openai:v{major}.{minor}.0"
    unpinned = [image for image in pulled.values() if not re.search(r":.+@sha256:\w{64}$", image)]
    assert unpinned == []


def test_vllm_has_the_flags_that_a_generator_would_start_it_with(
    services: dict[str, Service],
) -> None:
    command = services["vllm"].command
    assert isinstance(command, list)
    given = flags([VARIABLE.sub(r"\1", word) for word in command])
    wanted = needed(max_lora_rank=int(given["--max-lora-rank"] or ""))
    assert wanted == {
        name: given[name] for name in given.keys() - OF_THE_PLACE - {"--gpu-memory-utilization"}
    }
    assert given["--model"] == given["--served-model-name"]
    # It fetches the model itself.
    told = services["vllm"].environment
    assert SERVER_ENVIRONMENT.items() - told.items() == {("HF_HUB_OFFLINE", "1")}
