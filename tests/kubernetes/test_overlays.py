"""What only a whole overlay shows: that its parts find one another, and that no pod may do more
than it must."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from offbeat.contracts.jobs import WorkerRole
from services.orchestrator.health_api import DEFAULT_POOL
from tests.manifests import OVERLAYS, Document, containers, mappings, pods, rendered, settings_map

documents = cache(rendered)

SECRET_FILES = {
    "offbeat_api_key",
    "offbeat_orchestrator_database_url",
    "offbeat_redis_url",
    "offbeat_s3_access_key_id",
    "offbeat_s3_bucket",
    "offbeat_s3_endpoint_url",
    "offbeat_s3_secret_access_key",
    "offbeat_weight_proxy_database_url",
    "offbeat_worker_token",
}
"""Keys of the Secret `offbeat`, which the installer makes."""
OPTIONAL_KEY = "hf_token"
WRITABLE = {"emptyDir", "persistentVolumeClaim"}


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Document]:
    return documents(request.param)


def of_kind(overlay: list[Document], kind: str) -> list[Document]:
    return [document for document in overlay if document["kind"] == kind]


def templates(overlay: list[Document]) -> list[Document]:
    """The metadata and spec of every pod."""
    return [
        mapping
        for document in overlay
        for mapping in mappings(document)
        if "containers" in mapping.get("spec", {})
    ]


def selects(selector: Document, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
    )


def selected(overlay: list[Document], selector: Document) -> set[str]:
    """Names of the pods that a selector means."""
    labels = [template["metadata"]["labels"] for template in templates(overlay)]
    return {each["app.kubernetes.io/name"] for each in labels if selects(selector, each)}


def paths(value: Any, key: str) -> Iterator[Any]:
    return (mapping[key] for mapping in mappings(value) if key in mapping)


def test_every_role_is_there_once(overlay: list[Document]) -> None:
    names = [t["metadata"]["labels"]["app.kubernetes.io/name"] for t in templates(overlay)]
    roles = {"orchestrator", "weight-proxy", "generator", "trainer"}
    assert set(names) == roles
    assert {t["metadata"]["labels"]["app.kubernetes.io/part-of"] for t in templates(overlay)} == {
        "offbeat"
    }


def test_everything_is_in_the_namespace(overlay: list[Document]) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    assert {
        document["metadata"]["namespace"] for document in overlay if document is not namespace
    } == {namespace["metadata"]["name"]}


def test_no_pod_has_privileges(overlay: list[Document]) -> None:
    """As the namespace's `restricted` standard asks, and a file system that stays as it is."""
    for pod in pods(overlay):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "OFFBEAT_*_PORT could be one of Kubernetes' own"
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert {key for volume in pod["volumes"] for key in volume} <= {
            "name",
            "projected",
            *WRITABLE,
        }
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_every_container_says_what_it_needs(overlay: list[Document]) -> None:
    for pod in pods(overlay):
        for container in containers(pod):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            gpus = (part.get("nvidia.com/gpu") for part in container["resources"].values())
            assert len(set(gpus)) == 1


def test_every_process_of_ours_is_probed(overlay: list[Document]) -> None:
    probes = {
        container["name"]: {key for key in container if key.endswith("Probe")}
        for pod in pods(overlay)
        for container in containers(pod)
        if container["name"] != "vllm"
    }
    working = {"startupProbe", "livenessProbe"}
    serving = {*working, "readinessProbe"}
    assert probes == {
        **dict.fromkeys(("orchestrator", "weight-proxy"), serving),
        **dict.fromkeys(("generator", "trainer"), working),
    }


def test_what_is_named_is_there(overlay: list[Document]) -> None:
    maps = {document["metadata"]["name"] for document in of_kind(overlay, "ConfigMap")}
    claims = {
        document["metadata"]["name"] for document in of_kind(overlay, "PersistentVolumeClaim")
    }
    for pod in pods(overlay):
        assert {reference["name"] for reference in paths(pod, "configMapRef")} <= maps
        assert {volume["claimName"] for volume in paths(pod, "persistentVolumeClaim")} <= claims
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for kind in ("Service", "PodDisruptionBudget"):
        for document in of_kind(overlay, kind):
            selector = document["spec"]["selector"]
            labels = selector if kind == "Service" else selector["matchLabels"]
            assert selected(overlay, {"matchLabels": labels}) == {document["metadata"]["name"]}


def test_secrets_are_those_that_the_installer_makes(overlay: list[Document]) -> None:
    secrets = [secret for pod in pods(overlay) for secret in paths(pod, "secret")]
    assert {secret["name"] for secret in secrets} == {"offbeat"}
    assert {item["key"] for secret in secrets for item in secret["items"]} == SECRET_FILES
    by_variable = [key for pod in pods(overlay) for key in paths(pod, "secretKeyRef")]
    assert all(key["key"] == OPTIONAL_KEY and key["optional"] for key in by_variable)


def test_nothing_is_open_that_no_policy_opens(overlay: list[Document]) -> None:
    policies = of_kind(overlay, "NetworkPolicy")
    closed = [policy for policy in policies if not policy["spec"].keys() & {"ingress", "egress"}]
    assert [policy["spec"] for policy in closed] == [
        {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ]
    reached = {
        name
        for policy in policies
        if "ingress" in policy["spec"]
        for name in selected(overlay, policy["spec"]["podSelector"])
        if "ports" in policy["spec"]["ingress"][0]
    }
    assert reached == {"orchestrator", "weight-proxy"}, "nobody connects to a worker"
    for name in ("generator", "trainer"):
        targets = {
            target
            for policy in policies
            if name in selected(overlay, policy["spec"]["podSelector"])
            for rule in policy["spec"].get("egress", ())
            for peer in rule.get("to", ())
            if "podSelector" in peer
            for target in selected(overlay, peer["podSelector"])
        }
        assert targets - {name} == {"orchestrator", "weight-proxy"}


def test_what_is_scaled_is_there_and_no_busy_worker_goes() -> None:
    for overlay in (documents("gpu"), documents("multi-node")):
        (scaled,) = of_kind(overlay, "ScaledObject")
        target = scaled["spec"]["scaleTargetRef"]
        (found,) = (
            document
            for document in overlay
            if (document["apiVersion"], document["kind"], document["metadata"]["name"])
            == (target["apiVersion"], target["kind"], target["name"])
        )
        assert found["metadata"]["name"] == WorkerRole.GENERATOR
        behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"] == {"selectPolicy": "Disabled"}
        (trigger,) = scaled["spec"]["triggers"]
        asked = trigger["metadata"]
        namespace = scaled["metadata"]["namespace"]
        url = settings_map(overlay)["OFFBEAT_ORCHESTRATOR_URL"]
        assert asked["url"] == url.replace(":8000", f".{namespace}.svc:8000") + "/metrics"
        lane = f'{{role="{WorkerRole.GENERATOR}",pool="{DEFAULT_POOL}"}}'
        assert asked["valueLocation"] == f"offbeat_open_jobs{lane}"


def test_ranks_find_their_first_by_the_name_that_the_set_gives_it() -> None:
    (job_set,) = of_kind(documents("multi-node"), "JobSet")
    (job,) = job_set["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    first = f"{job_set['metadata']['name']}-{job['name']}-0-0"
    assert f"--master-addr={first}.{job_set['spec']['network']['subdomain']}" in arguments
    assert f"--nnodes={job['template']['spec']['parallelism']}" in arguments
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in arguments


def test_the_nodes_of_a_vllm_have_as_many_gpus_as_it_has_ranks() -> None:
    (group,) = of_kind(documents("multi-node"), "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        (vllm,) = (c for c in containers(template[name]["spec"]) if c["name"] == "vllm")
        gpus = int(vllm["resources"]["limits"]["nvidia.com/gpu"])
        assert f"--nnodes={template['size']}" in vllm["args"]
        assert f"--tensor-parallel-size={gpus * template['size']}" in vllm["args"]
