"""What lies in `deploy/kubernetes`, as documents, pods and containers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1] / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu", "multi-node")
KUSTOMIZE_FILES = {"kustomization.yaml", "names.yaml"}
"""They are for kustomize, not for Kubernetes."""

Document = dict[str, Any]


def written() -> list[Document]:
    """Every document as it is written, patches among them."""
    paths = sorted(ROOT.rglob("*.yaml"))
    return [
        document
        for path in paths
        if path.name not in KUSTOMIZE_FILES
        for document in yaml.safe_load_all(path.read_text())
    ]


def rendered(overlay: str) -> list[Document]:
    """Every document of an overlay, as `kubectl apply -k` would send it."""
    command = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(text))


def mappings(value: object) -> Iterator[Document]:
    """The mapping itself and every one within it."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from mappings(item)


def pods(documents: list[Document]) -> list[Document]:
    """The spec of every pod, wherever a kind of its own has it."""
    return [
        mapping
        for document in documents
        for mapping in mappings(document)
        if isinstance(mapping.get("containers"), list)
    ]


def containers(pod: Document) -> list[Document]:
    """Those that run as long as the pod does."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


def environment(container: Document) -> dict[str, str | None]:
    """The variables that are set one by one; none for the value of one from elsewhere."""
    return {entry["name"]: entry.get("value") for entry in container.get("env", ())}


def settings_map(documents: list[Document]) -> dict[str, str]:
    """The ConfigMap that all processes read, in documents that were rendered."""
    (found,) = (
        document["data"]
        for document in documents
        if document["kind"] == "ConfigMap"
        and document["metadata"]["name"].startswith("offbeat-settings")
    )
    return found
