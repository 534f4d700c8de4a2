"""`.env.example` is what the settings classes and `docker-compose.yml` say."""

from collections.abc import Iterator
from pathlib import Path

from offbeat.settings import EnvironmentSettings
from scripts.env_example import (
    COMPOSE_FILE,
    COMPOSE_VARIABLES,
    SETTINGS,
    compose_defaults,
    env_example,
    variables,
)


def _subclasses(settings: type[EnvironmentSettings]) -> Iterator[type[EnvironmentSettings]]:
    for subclass in settings.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def test_the_file_is_the_one_that_is_made() -> None:
    made = env_example(COMPOSE_FILE.read_text())
    assert Path(".env.example").read_text() == made, (
        "run `python -m scripts.env_example > .env.example`"
    )


def test_every_settings_class_is_in_it() -> None:
    classes = {
        settings
        for settings in _subclasses(EnvironmentSettings)
        if settings.__module__.startswith(("offbeat.", "services."))
    }
    assert classes == set(SETTINGS)


def test_every_setting_says_what_it_is_for() -> None:
    silent = {
        variable
        for settings in SETTINGS
        for variable, field in variables(settings)
        if not field.description
    }
    assert silent == set()


def test_every_variable_of_the_compose_file_is_explained() -> None:
    settings = {variable for cls in SETTINGS for variable, _ in variables(cls)}
    assert compose_defaults(COMPOSE_FILE.read_text()).keys() - settings == COMPOSE_VARIABLES.keys()


def test_a_default_of_the_compose_file_is_the_default_of_its_setting_or_a_host_of_the_file() -> (
    None
):
    text = env_example(COMPOSE_FILE.read_text())
    assert "#OFFBEAT_LEASE_S=30.0\n" in text
    assert "#OFFBEAT_VLLM_MAX_LORAS=8\n" in text
    defaults = compose_defaults(COMPOSE_FILE.read_text())
    assert {name: defaults[name] for name in ("OFFBEAT_VLLM_MAX_LORAS", "OFFBEAT_S3_BUCKET")} == {
        "OFFBEAT_VLLM_MAX_LORAS": "8",
        "OFFBEAT_S3_BUCKET": "offbeat",
    }
