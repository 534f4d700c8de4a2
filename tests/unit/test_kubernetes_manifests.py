"""The Kubernetes manifests say what the code says: names, ports, settings, probes, flags, times.

They are read as they are written, patches among them, so `kubectl` is not needed.
`make k8s-test` renders them, and checks what only the whole shows.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.contracts.plan import Plan
from offbeat.departure import EXIT_MARGIN_S
from offbeat.presence import ALIVE_FILE, REPORT_INTERVAL_S
from offbeat.serving import SHUTDOWN_GRACE_S
from offbeat.settings import (
    SECRETS_DIR,
    EnvironmentSettings,
    LogSettings,
    ObjectStoreSettings,
    QueueSettings,
    ServerSettings,
)
from scripts.env_example import variables
from services.generator.engines.vllm_checks import VERSION_TESTED
from services.generator.engines.vllm_command import SERVER_ENVIRONMENT
from services.generator.settings import GeneratorSettings
from services.orchestrator import health_api
from services.orchestrator.settings import OrchestratorSettings, WorkersSettings
from services.trainer.settings import TrainerSettings
from services.weight_proxy import app as weight_proxy_app
from services.weight_proxy.settings import WeightProxySettings
from tests.manifests import ROOT, Document, containers, environment, mappings, pods, written
from tests.vllm_flags import MAX_LORAS, OF_THE_PLACE, flags, needed

REPOSITORY = ROOT.parents[1]
SERVER = (LogSettings, ServerSettings, ObjectStoreSettings)
READS: dict[str, tuple[type[EnvironmentSettings], ...]] = {
    "orchestrator": (*SERVER, OrchestratorSettings, WorkersSettings, QueueSettings),
    "weight-proxy": (*SERVER, WeightProxySettings),
    "generator": (GeneratorSettings, QueueSettings, ObjectStoreSettings),
    "trainer": (TrainerSettings, QueueSettings, ObjectStoreSettings),
}
"""The settings classes of each process, by the name of its container."""
PORTS = {
    "orchestrator": OrchestratorSettings.model_fields["orchestrator_port"].default,
    "weight-proxy": WeightProxySettings.model_fields["port"].default,
}
MODULES = {
    "orchestrator": "services.orchestrator",
    "weight-proxy": "services.weight_proxy",
    "generator": "services.generator",
    "trainer": "services.trainer",
}
VLLM_EXIT_S = 10
"""Beside an idle vLLM, for it to end after the generator."""
PLANNED = re.compile(r"offbeat (plan .+?) says (\S+) GiB of a GPU and (\S+) GiB of the host")
FLAGS_OF_THE_SIZE = {
    "--distributed-executor-backend",
    "--gpu-memory-utilization",
    "--headless",
    "--master-addr",
    "--nnodes",
    "--node-rank",
    "--tensor-parallel-size",
}


def names_read_by(process: str) -> set[str]:
    names = {name for settings in READS[process] for name, _ in variables(settings)}
    return names | {SECRETS_DIR}


def settings_literals() -> dict[str, str]:
    """The ConfigMap that every process reads."""
    kustomization = yaml.safe_load((ROOT / "base" / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generated["literals"])


def own_containers() -> Iterator[tuple[Document, Document]]:
    """Each pod and each of its containers that is a process of ours."""
    for pod in pods(written()):
        for container in containers(pod):
            if container["name"] in MODULES:
                yield pod, container


def vllm_containers() -> Iterator[Document]:
    return (
        container
        for pod in pods(written())
        for container in containers(pod)
        if container["name"] == "vllm"
    )


def http_paths(container: Document) -> set[str]:
    return {mapping["httpGet"]["path"] for mapping in mappings(container) if "httpGet" in mapping}


def test_every_process_has_a_container() -> None:
    assert {container["name"] for _, container in own_containers()} == set(MODULES)


def test_what_a_container_sets_is_a_setting_of_its_process() -> None:
    unknown = {
        (container["name"], name)
        for _, container in own_containers()
        for name in environment(container)
        if name.startswith("OFFBEAT_") and name not in names_read_by(container["name"])
    }
    assert unknown == set()


def test_what_all_processes_are_told_is_a_setting_of_some() -> None:
    assert settings_literals().keys() - set().union(*map(names_read_by, READS)) == set()


def test_every_file_of_a_secret_is_a_setting_of_its_process() -> None:
    for pod in pods(written()):
        files = {item["path"] for item in mappings(pod.get("volumes")) if "path" in item}
        for container in containers(pod):
            if files and container["name"] in READS:
                assert {path.upper() for path in files} <= names_read_by(container["name"])
                (mount,) = (m for m in container["volumeMounts"] if m["name"] == "secrets")
                assert mount["mountPath"] == settings_literals()[SECRETS_DIR]


def test_workers_get_no_secret_but_their_token_and_redis() -> None:
    for pod in pods(written()):
        if pod["containers"][0]["name"] in ("generator", "trainer"):
            files = {item["path"] for item in mappings(pod.get("volumes")) if "path" in item}
            assert files <= {"offbeat_worker_token", "offbeat_redis_url"}


def test_processes_are_started_as_everywhere() -> None:
    for _, container in own_containers():
        words = [*container.get("command", ()), *container.get("args", ())]
        if words:
            module = MODULES[container["name"]]
            assert words[0] == "python"
            assert words[-2:] == ["-m", module]
            assert find_spec(f"{module}.__main__") is not None


def test_ports_are_those_that_the_services_listen_on() -> None:
    listening = {
        container["name"]: [port["containerPort"] for port in container["ports"]]
        for _, container in own_containers()
        if container["name"] in PORTS
    }
    services = {
        document["metadata"]["name"]: [port["port"] for port in document["spec"]["ports"]]
        for document in written()
        if document["kind"] == "Service"
    }
    assert listening == services == {name: [port] for name, port in PORTS.items()}
    literals = settings_literals()
    for name, port in PORTS.items():
        variable = f"OFFBEAT_{name.upper().replace('-', '_')}_URL"
        assert literals[variable] == f"http://{name}:{port}"


def test_policies_open_the_ports_that_the_services_listen_on() -> None:
    opened = {
        document["metadata"]["name"]: port["port"]
        for document in written()
        if document["kind"] == "NetworkPolicy"
        for rule in document["spec"].get("ingress", ())
        for port in rule.get("ports", ())
    }
    assert opened == PORTS


def test_probes_ask_for_routes_that_are_there() -> None:
    routes = {
        "orchestrator": {route.path for route in health_api.router.routes},  # pyright: ignore[reportAttributeAccessIssue]
        "weight-proxy": {route.path for route in weight_proxy_app.health.routes},  # pyright: ignore[reportAttributeAccessIssue]
    }
    for _, container in own_containers():
        if container["name"] in PORTS:
            assert http_paths(container) == {"/healthz", "/readyz"}
            assert http_paths(container) < routes[container["name"]]
            assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_probes_of_workers_look_at_the_file_that_they_write() -> None:
    looked = re.compile(r'find "\$OFFBEAT_DATA_DIR/(\w+)" -newermt \'(\d+) seconds ago\'')
    for _, container in own_containers():
        for probe in ("startupProbe", "livenessProbe"):
            if container["name"] in ("generator", "trainer") and probe in container:
                found = looked.search(container[probe]["exec"]["command"][-1])
                assert found is not None
                assert found[1] == ALIVE_FILE
                assert float(found[2]) > 3 * REPORT_INTERVAL_S


def test_a_pod_is_given_the_time_that_its_processes_take_to_end() -> None:
    for pod, container in own_containers():
        given_s = pod.get("terminationGracePeriodSeconds")
        if container["name"] in PORTS:
            drain_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            assert given_s > drain_s + SHUTDOWN_GRACE_S
        elif given_s is not None:
            grace_s = float(environment(container)["OFFBEAT_GRACE_S"] or "")
            has_vllm = any(each["name"] == "vllm" for each in containers(pod))
            assert given_s > grace_s + EXIT_MARGIN_S + has_vllm * VLLM_EXIT_S


def test_vllm_has_the_flags_that_a_generator_would_start_it_with() -> None:
    (size,) = {
        (env["OFFBEAT_VLLM_MAX_LORAS"], env["OFFBEAT_VLLM_URL"])
        for _, container in own_containers()
        if "OFFBEAT_VLLM_URL" in (env := environment(container))
    }
    assert size == (str(MAX_LORAS), "http://127.0.0.1:8100")
    for container in vllm_containers():
        given = flags(container["args"])
        wanted = needed(max_lora_rank=int(given["--max-lora-rank"] or ""))
        assert wanted == {
            name: given[name] for name in given.keys() - OF_THE_PLACE - FLAGS_OF_THE_SIZE
        }
        # Ranks without the server listen to nobody; the server, to its pod alone.
        assert given.get("--host") == (None if "--headless" in given else "127.0.0.1")
        assert given["--served-model-name"] == container["command"][-1]
        told = environment(container)
        offline = {"HF_HUB_OFFLINE"}  # it fetches the model itself
        assert SERVER_ENVIRONMENT.keys() - told.keys() == offline


def test_a_generator_knows_the_rank_of_its_vllm() -> None:
    for pod, container in own_containers():
        beside = [each for each in containers(pod) if each["name"] == "vllm"]
        for vllm in beside:
            told = environment(container)
            assert told["OFFBEAT_VLLM_MAX_LORA_RANK"] == flags(vllm["args"])["--max-lora-rank"]
            probe = vllm["startupProbe"]
            waits_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert float(told["OFFBEAT_VLLM_START_TIMEOUT_S"] or "") == waits_s


@pytest.mark.parametrize("overlay", ["gpu", "multi-node"])
def test_a_trainer_asks_for_what_the_plan_says(overlay: str) -> None:
    """The plan is named in a comment beside the numbers, with what it says; it is made again."""
    text = (ROOT / "overlays" / overlay / "trainer.yaml").read_text()
    said = PLANNED.search(" ".join(line.strip(" #") for line in text.splitlines()))
    assert said is not None
    command, gpu_gib, host_gib = said.groups()
    plan = Plan.model_validate_json(
        CliRunner().invoke(app, [*shlex.split(command), "--json"]).stdout
    )
    (trainer,) = (c for pod in pods(list(yaml.safe_load_all(text))) for c in containers(pod))
    asked = trainer["resources"]["requests"]
    others = int(asked["nvidia.com/gpu"]) - 1
    host_bytes = plan.ranks[0].host_bytes + others * plan.ranks[-1].host_bytes
    assert plan.verdict == "fits"
    assert f"{plan.memory.total / 2**30:.1f}" == gpu_gib
    assert f"{host_bytes / 2**30:.1f}" == host_gib
    assert int(asked["memory"].removesuffix("Gi")) > float(host_gib)


def test_images_have_the_version_of_the_code() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    major, minor = VERSION_TESTED
    tags = {
        "offbeat-control": {version},
        "offbeat-generator": {version},
        "offbeat-trainer": {version, f"{version}-cuda"},
        "vllm/vllm-openai": {f"v{major}.{minor}.0"},
    }
    found: dict[str, set[str]] = {name: set() for name in tags}
    for path in ROOT.rglob("kustomization.yaml"):
        for image in yaml.safe_load(path.read_text()).get("images", ()):
            found[image["name"]].add(image["newTag"])
    assert found == tags


def test_pods_run_as_the_user_of_the_images() -> None:
    (user,) = re.findall(
        r"--uid (\d+)", (REPOSITORY / "deploy" / "images" / "Dockerfile").read_text()
    )
    users = {
        pod["securityContext"]["runAsUser"] for pod in pods(written()) if "securityContext" in pod
    }
    assert users == {int(user)}


@pytest.mark.parametrize(
    ("variable", "volume"),
    [
        ("OFFBEAT_DATA_DIR", "worker"),
        ("OFFBEAT_MODEL_CACHE_DIR", "models"),
        ("OFFBEAT_WEIGHT_PROXY_CACHE_DIR", "cache"),
    ],
)
def test_folders_that_are_written_are_volumes(variable: str, volume: str) -> None:
    folders = [
        (environment(container)[variable], mount["mountPath"])
        for _, container in own_containers()
        if variable in environment(container)
        for mount in container["volumeMounts"]
        if mount["name"] == volume
    ]
    assert folders
    for folder, mount in folders:
        assert folder is not None
        assert Path(folder).is_relative_to(mount)


def test_addresses_and_folders_are_those_of_the_compose_file() -> None:
    composed = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["x-environment"]
    ours = dict(settings_literals())
    for _, container in own_containers():
        ours |= {name: value or "" for name, value in environment(container).items()}
    shared = {
        name
        for name in composed.keys() & ours.keys() - {SECRETS_DIR, "OFFBEAT_LOG_FORMAT"}
        if not ours[name].endswith("$(OFFBEAT_WORKER_ID)")
    }
    assert {name: ours[name] for name in shared} == {name: composed[name] for name in shared}
    assert {"OFFBEAT_ORCHESTRATOR_URL", "OFFBEAT_WEIGHT_PROXY_URL"} < shared
