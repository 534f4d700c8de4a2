"""`docker-compose.yml` keeps to the names of the code, and to what is promised of containers."""

import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict

from scripts.env_example import SETTINGS, compose_defaults, variables

OWN_IMAGES = ("offbeat-control:", "offbeat-generator:", "offbeat-trainer:")
THREADS = "OMP_NUM_THREADS"
SECRETS_DIR = "OFFBEAT_SECRETS_DIR"


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
    assert given - _known() == {SECRETS_DIR, THREADS}


def test_every_secret_of_a_service_is_a_setting_and_in_no_environment(
    services: dict[str, Service],
) -> None:
    for service in services.values():
        if service.is_own:
            names = {name.upper() for name in service.secrets}
            assert names <= _known()
            assert names.isdisjoint(service.environment)


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
            assert service.mem_limit is not None, name


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
