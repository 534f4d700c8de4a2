"""`.env.example`: every variable that one may set, with its meaning and default, made from the
settings classes and from `docker-compose.yml`.

    python -m scripts.env_example > .env.example
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from offbeat.settings import (
    SECRETS_DIR,
    EnvironmentSettings,
    LogSettings,
    ObjectStoreSettings,
    QueueSettings,
    ServerSettings,
    WorkerSettings,
)
from services.generator.settings import GeneratorSettings
from services.orchestrator.settings import OrchestratorSettings, WorkersSettings
from services.trainer.settings import TrainerSettings
from services.weight_proxy.settings import WeightProxySettings

COMPOSE_FILE = Path("docker-compose.yml")
WIDTH = 100
SETTINGS: Mapping[type[EnvironmentSettings], str] = {
    LogSettings: "Every process",
    ObjectStoreSettings: "The object store",
    QueueSettings: "The queue",
    WorkerSettings: "Generators and trainers",
    GeneratorSettings: "Generators",
    TrainerSettings: "Trainers",
    ServerSettings: "Orchestrator and weight-proxy",
    OrchestratorSettings: "Orchestrator",
    WorkersSettings: "What the orchestrator tells workers of the other parts",
    WeightProxySettings: "Weight-proxy",
}
"""All settings classes with their titles, in the order in which they are shown. A variable that two
of them read is shown with the first."""
COMPOSE_VARIABLES: Mapping[str, str] = {
    "OFFBEAT_VERSION": "Tag of the images `offbeat-control`, `offbeat-trainer` and "
    "`offbeat-generator`.",
    "OFFBEAT_PUBLISH": "Where the orchestrator's port is published; the only one that is. "
    "`0.0.0.0:8000` shows it to the network: put TLS before it.",
    "GENERATORS": "Generators on CPUs. 0 where the profile `gpu` runs.",
    "TRAINERS": "Trainers on CPUs. 0 where the profile `gpu` runs.",
    "GENERATOR_THREADS": "Threads of each generator on CPUs: the cores divided by the workers.",
    "TRAINER_THREADS": "Threads of each trainer on CPUs.",
    "GENERATOR_CPUS": "Limit of processor time, in cores; 0 is none.",
    "GENERATOR_MEMORY": "Limit of memory; a generator that needs more is killed and started again.",
    "TRAINER_CPUS": "Limit of processor time, in cores; 0 is none.",
    "TRAINER_MEMORY": "Limit of memory.",
    "CONTROL_CPUS": "Limit of processor time of orchestrator and weight-proxy, each.",
    "CONTROL_MEMORY": "Limit of memory of orchestrator and weight-proxy, each.",
    "POSTGRES_MEMORY": "Limit of memory of PostgreSQL.",
    "MINIO_MEMORY": "Limit of memory of MinIO.",
    "VLLM_IMAGE": "Profile `gpu`: vLLM's own image.",
    "VLLM_MODEL": "Profile `gpu`: the model that vLLM serves; runs name it as `model.id`.",
    "VLLM_GPU": "Profile `gpu`: number of the GPU that vLLM uses.",
    "VLLM_GPU_MEMORY": "Profile `gpu`: vLLM's share of its GPU's memory; 0.4 where the trainer has "
    "the same GPU.",
    "VLLM_MEMORY": "Profile `gpu`: vLLM's limit of main memory.",
    "TRAINER_GPU": "Profile `gpu`: number of the GPU that the trainer uses.",
    "TRAINER_GPU_MEMORY": "Profile `gpu`: the trainer's limit of main memory.",
}
"""What only `docker-compose.yml` knows, and what it is for."""
HEADER = f"""\
# Settings of Offbeat. Lines without # are in force: `cp .env.example .env`, then take the # away.
#
# For docker-compose.yml this is all; what it sets itself is marked "(compose)". Elsewhere the
# OFFBEAT_* are environment variables. Instead of there, each may be a file of its name in the
# folder that {SECRETS_DIR} names, as secrets are mounted.
#
# On a machine with GPUs: `make images && make images TORCH=cuda`, and
#COMPOSE_PROFILES=gpu
#GENERATORS=0
#TRAINERS=0
"""


def main() -> None:
    """Print the file."""
    sys.stdout.write(env_example(COMPOSE_FILE.read_text()))


def env_example(compose: str) -> str:
    """The whole file, for this text of `docker-compose.yml`."""
    environment: dict[str, str] = yaml.safe_load(compose)["x-environment"]
    fixed = {name for name, value in environment.items() if not value.startswith("${")}
    sections = [HEADER, _compose_section(compose)]
    shown: set[str] = set()
    for settings, title in SETTINGS.items():
        lines = [_title(title)]
        for variable, field in variables(settings):
            if variable not in shown:
                shown.add(variable)
                note = " (compose)" if variable in fixed else ""
                lines.append(_entry(variable, (field.description or "") + note, _default(field)))
        if len(lines) > 1:
            sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def variables(settings: type[EnvironmentSettings]) -> Iterator[tuple[str, FieldInfo]]:
    """The environment variables that a class reads, without those of settings inside it."""
    prefix = settings.model_config.get("env_prefix", "")
    for name, field in settings.model_fields.items():
        is_nested = isinstance(field.annotation, type) and issubclass(
            field.annotation, EnvironmentSettings
        )
        if not is_nested:
            yield f"{prefix}{name}".upper(), field


def compose_defaults(compose: str) -> dict[str, str]:
    """The variables of `docker-compose.yml`, each with its default."""
    return dict(re.findall(r"\$\{(\w+):-([^}]*)\}", compose))


def _compose_section(compose: str) -> str:
    defaults = compose_defaults(compose)
    entries = (_entry(name, text, defaults[name]) for name, text in COMPOSE_VARIABLES.items())
    return "\n".join([_title(str(COMPOSE_FILE)), *entries]) + "\n"


def _title(text: str) -> str:
    return f"# -- {text} ".ljust(WIDTH, "-")


def _entry(variable: str, description: str, default: str) -> str:
    text = textwrap.fill(
        " ".join(description.split()), WIDTH, initial_indent="# ", subsequent_indent="# "
    )
    return f"{text}\n#{variable}={default}"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if value is None or value is PydanticUndefined:
        return ""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return value.value if isinstance(value, StrEnum) else str(value)


if __name__ == "__main__":
    main()
