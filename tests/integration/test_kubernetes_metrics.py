"""Dashboard, alerts and autoscaler ask for what the two services really tell Prometheus."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from offbeat.objects import S3ObjectStore
from tests.manifests import ROOT, Document, mappings
from tests.orchestrator import Hand, Orchestrator, running_orchestrator, set_up, submit
from tests.waiting import wait_until
from tests.weight_proxy import running_proxy

POOL = "metrics-tests"
"""Its queues have no message of other tests."""
MONITORING = ROOT / "components" / "monitoring"
OF_PROMETHEUS = {"up": {"service"}}
"""What Prometheus itself knows of what it scrapes."""
SERIES = re.compile(r"\b(up|offbeat_\w+)\b(?:\{([^}]*)\})?")
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum", "_created")


def told(text: str) -> dict[str, set[str]]:
    """Every series of a scrape and its labels; a family without samples has its name alone."""
    series: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for name in names_of(family):
            series[name] = set().union(*(s.labels for s in family.samples if s.name == name))
    return series


def names_of(family: Metric) -> set[str]:
    if family.type == "histogram":
        return {family.name + part for part in HISTOGRAM_PARTS}
    return {f"{family.name}_total"} if family.type == "counter" else {family.name}


@pytest.fixture(scope="module")
def emitted(
    tmp_path_factory: pytest.TempPathFactory, valkey_url: str, store: S3ObjectStore
) -> dict[str, set[str]]:
    """Of both services, while a run waits for its first samples."""
    folder = tmp_path_factory.mktemp("metrics")
    with (
        running_orchestrator(folder, valkey_url, store) as orchestrator,
        httpx.Client(base_url=orchestrator.url) as http,
    ):
        submit(http, pool=POOL)
        set_up(Hand(orchestrator, pool=POOL))
        wait_until(lambda: "offbeat_groups{" in http.get("/metrics").text)
        series = told(http.get("/metrics").text)
    with running_proxy(store, folder) as proxy:
        return series | told(httpx.get(f"{proxy.url}/metrics").text) | OF_PROMETHEUS


def alerts() -> list[Document]:
    rule = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


def panels() -> list[Document]:
    return json.loads((MONITORING / "dashboard.json").read_text())["panels"]


def expressions() -> Iterator[str]:
    for mapping in (*mappings(panels()), *mappings(alerts())):
        if "expr" in mapping:
            yield mapping["expr"]
    scaled = yaml.safe_load((ROOT / "components" / "keda" / "generator.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield trigger["metadata"]["valueLocation"]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_what_is_asked_for_is_told(expression: str, emitted: dict[str, set[str]]) -> None:
    found = SERIES.findall(expression)
    assert found
    for name, matchers in found:
        assert name in emitted
        assert set(re.findall(r"(\w+)=", matchers)) <= emitted[name]
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    labels = {label for group in grouped for label in group.split(", ")} - {"le"}
    assert labels <= set().union(*(emitted[name] for name, _ in found))


def test_everything_that_is_told_is_shown(emitted: dict[str, set[str]]) -> None:
    shown = {name for panel in panels() for name, _ in SERIES.findall(json.dumps(panel["targets"]))}
    own = {name for name in emitted if not name.endswith(("_created", "_sum", "_count"))}
    assert own - shown == set()


def test_every_alert_is_explained() -> None:
    text = Path("docs/operations.md").read_text()
    assert [alert["alert"] for alert in alerts() if f"`{alert['alert']}`" not in text] == []


def test_what_alerts_count_is_0_before_the_first_failure(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with running_orchestrator(tmp_path, valkey_url, store) as orchestrator:
        lines = httpx.get(f"{orchestrator.url}/metrics").text.splitlines()
    assert 'offbeat_runs{status="failed"} 0.0' in lines
    assert 'offbeat_jobs{kind="train",status="dead"} 0.0' in lines


def test_a_lane_says_how_many_jobs_it_has_and_an_empty_one_says_none(
    tmp_path: Path, valkey_url: str, store: S3ObjectStore
) -> None:
    with running_orchestrator(tmp_path, valkey_url, store) as orchestrator:
        assert open_jobs(orchestrator) == {("generator", "default"): 0, ("trainer", "default"): 0}
        with httpx.Client(base_url=orchestrator.url) as http:
            run_id = submit(http, pool="large")
            wait_until(lambda: open_jobs(orchestrator).get(("generator", "large")) == 1)
            http.post(f"/v1/runs/{run_id}/pause")
            wait_until(lambda: ("generator", "large") not in open_jobs(orchestrator))


def open_jobs(orchestrator: Orchestrator) -> dict[tuple[str, str], float]:
    text = httpx.get(f"{orchestrator.url}/metrics").text
    return {
        (sample.labels["role"], sample.labels["pool"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "offbeat_open_jobs"
    }
