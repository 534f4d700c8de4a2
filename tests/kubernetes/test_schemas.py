"""Every overlay against the schemas of three Kubernetes versions and of the custom resources.

The schemas are packages: `make k8s-test` installs them. Models of custom resources leave out keys
that they do not know, so what comes out of one must be what went in.
"""

import json
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.manifests import OVERLAYS, Document, rendered

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
referencing = pytest.importorskip("referencing")

VERSIONS = ("1.35", "1.36", "1.37")
MODELS = {
    "JobSet": ("kubeflow_trainer_api.models", "JobsetV1alpha2JobSet"),
    "ScaledObject": ("cloudcoil.models.keda.v1alpha1", "ScaledObject"),
    "ServiceMonitor": ("cloudcoil.models.prometheus_operator.v1", "ServiceMonitor"),
    "PrometheusRule": ("cloudcoil.models.prometheus_operator.v1", "PrometheusRule"),
}
"""Custom resources by kind: the module and the class that describe them."""
LEADER_WORKER_SET = json.loads((Path(__file__).parent / "leaderworkerset.json").read_text())
POD_TEMPLATE = {
    "$ref": "https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.core.v1.PodTemplateSpec"
}

EMPTY_POD = {"spec": {"containers": []}}

documents = cache(rendered)


@cache
def definitions(version: str) -> Any:
    """Kubernetes' own types, for schemas that refer to them."""
    name = f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json"
    content = kubernetes_validate.utils.schema_contents(name, version)
    return referencing.Resource.from_contents(content) @ referencing.Registry()


def check(value: Document, schema: dict[str, Any], version: str) -> None:
    """Raise `jsonschema.ValidationError` unless the value is as the schema says."""
    validator = jsonschema.validators.Draft202012Validator(schema, registry=definitions(version))
    validator.validate(value)


def check_core(document: Document, version: str) -> None:
    """The same for what Kubernetes itself has."""
    kubernetes_validate.validate(document, version, strict=True)


def check_custom(document: Document, version: str) -> None:
    """The same for a custom resource, whose schema is that of every version but for its pods."""
    kind = document["kind"]
    if kind == "LeaderWorkerSet":
        check(document, LEADER_WORKER_SET, version)
        return
    own = deepcopy(document)
    if kind == "JobSet":
        for job in own["spec"]["replicatedJobs"]:
            check(job["template"]["spec"].pop("template"), POD_TEMPLATE, version)
            job["template"]["spec"]["template"] = EMPTY_POD
    module, name = MODELS[kind]
    model = getattr(import_module(module), name).model_validate(own)
    known = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
    assert keys(own) - keys(known) == set()
    assert known == own


def keys(value: object, path: str = "") -> set[str]:
    """Every key within, as `.spec.triggers.0.type`."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path}
    return {path}.union(*(keys(item, f"{path}.{key}") for key, item in value.items()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid(overlay: str, version: str) -> None:
    for document in documents(overlay):
        is_custom = document["kind"] in {*MODELS, "LeaderWorkerSet"}
        (check_custom if is_custom else check_core)(document, version)


def test_the_versions_are_the_newest_that_the_package_has() -> None:
    newest = kubernetes_validate.latest_version()
    assert newest.startswith(VERSIONS[-1])


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet", *MODELS])
def test_a_key_that_is_not_known_is_found(kind: str) -> None:
    (document, *_) = (
        document
        for overlay in OVERLAYS
        for document in documents(overlay)
        if document["kind"] == kind
    )
    wrong = {**document, "spec": {**document["spec"], "replikas": 2}}
    validate = check_core if kind == "Deployment" else check_custom
    with pytest.raises((AssertionError, jsonschema.ValidationError), match="replikas"):
        validate(wrong, VERSIONS[-1])
