"""Following a run: a real weight-proxy over a real store, and the transformers engine."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offbeat.errors import IntegrityError, UnavailableError
from offbeat.models import load_tokenizer
from offbeat.objects import S3ObjectStore
from services.generator.engines.base import SampleRequest, Sampling
from services.generator.models import RUNS_MAX, BaseModel
from services.generator.pull import Scratch
from tests.following import Following, WatchedEngine, following
from tests.policies import PROMPT_IDS, Reference, upload_policy
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy

GREEDY = Sampling(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture
def setting(
    proxy: RunningProxy,
    store: S3ObjectStore,
    reference: Reference,
    tiny_model: Path,
    tmp_path: Path,
    run_id: str,
) -> Iterator[Following]:
    with following(
        run_id, store, reference, proxy.url, tiny_model, tmp_path / "adapters"
    ) as running:
        yield running


def test_a_published_version_is_pulled_proved_and_lent(setting: Following) -> None:
    digest = setting.publish(0)
    setting.policies.start()
    with setting.policies.newest(0) as policy:
        assert (policy.name, policy.version) == (f"{setting.run_id}-v0", 0)
        assert policy.adapter_sha256 == digest
        assert setting.engine.loaded() == {policy.name}
    assert setting.serving == [0]
    assert setting.folders == ["v000000"]
    served = setting.wait_for_event("version_served")
    assert served.data["version"] == 0
    assert served.data["adapter_sha256"] == digest
    assert served.data["canary_mean_abs_difference"] == pytest.approx(0, abs=1e-4)


def test_a_newer_version_is_served_as_soon_as_it_is_published(setting: Following) -> None:
    setting.publish(0)
    setting.policies.start()
    setting.wait_for(0)
    setting.publish(1)
    with setting.policies.newest(1, timeout_s=30) as policy:
        assert policy.version == 1
    wait_until(lambda: len(setting.events) == 2)
    data = setting.events[1].data
    separation, waited_s = data["canary_separation"], data["publish_to_served_s"]
    assert isinstance(separation, float)
    assert separation == pytest.approx(1, abs=0.05)
    assert isinstance(waited_s, float)
    spent_s = sum(float(data[part] or 0) for part in ("download_s", "load_s", "canary_s"))
    assert waited_s >= spent_s * 0.9


def test_only_what_has_changed_is_pulled(setting: Following) -> None:
    """The configuration is that of the version before, unless its folder is gone."""
    setting.publish(0)
    setting.policies.start()
    setting.wait_for(0)
    setting.publish(1)
    setting.wait_for(1)
    first, second = sorted(setting.folder.glob("*/v*"))
    assert (first / ADAPTER_CONFIG).read_bytes() == (second / ADAPTER_CONFIG).read_bytes()
    (second / ADAPTER_CONFIG).write_bytes(b"{}")
    setting.publish(2)
    setting.wait_for(2)
    assert setting.client.pulled == [
        (0, ADAPTER_WEIGHTS),
        (0, ADAPTER_CONFIG),
        (1, ADAPTER_WEIGHTS),
        (2, ADAPTER_WEIGHTS),
        (2, ADAPTER_CONFIG),
    ]


def test_a_version_is_not_served_before_it_is_proved(setting: Following) -> None:
    """W8."""
    reached, finish = threading.Event(), threading.Event()
    setting.engine.before_canary = lambda: (reached.set(), finish.wait())
    setting.publish(0)
    setting.policies.start()
    reached.wait()
    assert setting.engine.loaded() == {f"{setting.run_id}-v0"}
    assert setting.serving == []
    with pytest.raises(UnavailableError, match="none was published"):
        setting.policies.newest(0, timeout_s=0).__enter__()
    finish.set()
    setting.wait_for(0)


def test_weights_of_the_parent_are_refused(setting: Following) -> None:
    """W4: version 2 has come with a canary that it is only the parent of."""
    for version in (0, 1):
        setting.publish(version)
    setting.policies.start()
    setting.wait_for(1)
    setting.publish(2, canary=setting.reference.canary(3))
    refused = setting.wait_for_event("canary_failed")
    assert refused.data["version"] == 2
    assert "it resembles the parent version (c = " in refused.message
    assert setting.serving == [1], "0 was superseded before it was seen"
    assert setting.engine.loaded() == {f"{setting.run_id}-v1"}
    assert setting.folders == ["v000001"]
    with pytest.raises(UnavailableError, match="version 2 was refused, it resembles the parent"):
        setting.policies.newest(2, timeout_s=0).__enter__()

    setting.publish(3)
    setting.wait_for(3)
    assert setting.serving == [1, 3]


def test_an_engine_that_serves_the_base_model_is_found_out(setting: Following) -> None:
    """W3, W5, W6, W12: it says yes to every load and answers without the adapter."""
    setting.publish(0)
    setting.policies.start()
    setting.wait_for(0)
    setting.engine.deaf_to = f"{setting.run_id}-v0"
    for version in (1, 2, 3):
        setting.publish(version)
        wait_until(lambda count=version: len(setting.events) == count + 1)
    assert [event.kind for event in setting.events] == ["version_served"] + ["canary_failed"] * 3
    assert setting.serving == [0]


def test_a_version_of_another_base_model_is_refused(setting: Following) -> None:
    manifest = upload_policy(setting.store, setting.run_id, 0, setting.reference.canary(0))
    setting.client.publish(manifest.model_copy(update={"base_revision": "main"}))
    setting.policies.start()
    message = setting.wait_for_event("canary_failed").message
    assert "was trained on 'tiny' at 'main', the run's model is 'tiny' at None" in message
    assert setting.engine.contents == []


def test_a_manifest_that_tells_another_scale_is_refused(setting: Following) -> None:
    """W12."""
    manifest = upload_policy(setting.store, setting.run_id, 0, setting.reference.canary(0))
    setting.client.publish(manifest.model_copy(update={"alpha": 8.0}))
    setting.policies.start()
    assert (
        "has rank, alpha, use_rslora and targets (2, 4,"
        in setting.wait_for_event("canary_failed").message
    )


def test_versions_in_use_survive_those_that_follow(setting: Following) -> None:
    """L7: a long job on version 1 while 2 to 8 are published."""
    for version in (0, 1):
        setting.publish(version)
    setting.policies.start()
    request = SampleRequest(prompt_ids=PROMPT_IDS, seeds=(0,))
    with setting.policies.newest(1) as policy:
        before = setting.engine.generate([request], policy.name, GREEDY)
        for version in range(2, 9):
            setting.publish(version)
        setting.wait_for(8)
        assert policy.name in setting.engine.loaded()
        assert policy.folder.is_dir()
        assert setting.engine.generate([request], policy.name, GREEDY) == before
    setting.publish(9)
    setting.wait_for(9)
    wait_until(lambda: policy.name not in setting.engine.loaded())
    wait_until(lambda: not policy.folder.exists())


def test_p6_a_download_that_breaks_off_is_pulled_again(setting: Following) -> None:
    """P6: the worker stays on the last version, and nothing is left of the broken one."""
    setting.publish(0)
    setting.policies.start()
    setting.wait_for(0)
    setting.client.cuts = 1
    setting.publish(1)
    wait_until(lambda: setting.client.cuts == 0)
    assert setting.serving == [0]
    setting.wait_for(1)
    assert setting.folders == ["v000000", "v000001"]
    assert [name for name, _ in setting.engine.contents] == [
        f"{setting.run_id}-v{version}" for version in (0, 1)
    ]


@pytest.mark.parametrize("fault", ["load_failures", "load_losses"])
def test_a_load_that_fails_or_has_no_effect_is_tried_again(setting: Following, fault: str) -> None:
    """W3, W8: the version that is reported does not move meanwhile."""
    setting.publish(0)
    setting.policies.start()
    setting.wait_for(0)
    setattr(setting.engine, fault, 1)
    setting.publish(1)
    wait_until(lambda: getattr(setting.engine, fault) == 0)
    assert setting.serving == [0]
    setting.wait_for(1)
    assert {event.kind for event in setting.events} == {"version_served"}


def test_a_new_process_loads_the_version_before_it_serves_it(
    setting: Following, tiny_model: Path
) -> None:
    """L9, and L8: what the old process left on disk is swept."""
    setting.publish(0)
    setting.publish(1)
    setting.policies.start()
    setting.wait_for(1)
    engine = setting.engine = WatchedEngine(tiny_model)
    setting.folder = setting.folder.parent / "second"
    restarted = setting.follow(setting.run_id)
    assert restarted.serving() == ()
    restarted.start()
    with restarted.newest(1, timeout_s=30) as policy:
        assert engine.loaded() == {policy.name}
    wait_until(lambda: len(setting.events) == 2)
    assert setting.events[1].data["publish_to_served_s"] is None, "published before it started"
    restarted.close()


def test_an_evaluation_gets_exactly_its_version(setting: Following) -> None:
    for version in range(4):
        setting.publish(version)
    setting.policies.start()
    setting.wait_for(3)
    with setting.policies.exact(1) as policy:
        assert policy.version == 1
        assert setting.serving == [1, 3]
        with setting.policies.newest(0) as newest:
            assert newest.version == 3
        with setting.policies.exact(1) as again:
            assert again == policy
    assert [name for name, _ in setting.engine.contents].count(policy.name) == 1
    with pytest.raises(UnavailableError, match=r"version 9 of .* is not published"):
        setting.policies.exact(9).__enter__()


def test_an_evaluation_of_a_refused_version_says_why(setting: Following) -> None:
    setting.publish(0)
    setting.publish(1, canary=setting.reference.canary(2))
    with pytest.raises(IntegrityError, match="it resembles the parent version"):
        setting.policies.exact(1).__enter__()


def test_a_run_that_is_given_up_leaves_nothing_behind(setting: Following) -> None:
    setting.publish(0)
    setting.policies.start()
    with setting.policies.newest(0) as policy:
        setting.policies.close()
        assert setting.engine.loaded() == {policy.name}
    wait_until(lambda: not setting.engine.loaded())
    wait_until(lambda: not setting.folders)
    assert not setting.policies.touch()


def test_the_run_used_longest_ago_makes_room(setting: Following, tiny_model: Path) -> None:
    base = BaseModel(
        engine=setting.engine,
        tokenizer=load_tokenizer(tiny_model, None),
        new_policies=setting.follow,
    )
    runs = [base.policies(f"{setting.run_id}-{number}") for number in range(RUNS_MAX)]
    assert base.policies(f"{setting.run_id}-0") is runs[0]
    base.policies(f"{setting.run_id}-{RUNS_MAX}")
    assert [run.touch() for run in runs] == [True, False] + [True] * (RUNS_MAX - 2)
    assert base.policies(f"{setting.run_id}-1") is not runs[1]
    base.close()


def test_folders_of_processes_that_are_gone_are_swept(tmp_path: Path) -> None:
    """L8."""
    alive = Scratch(tmp_path, "generator-a")
    dead = Scratch(tmp_path, "generator-b")
    for scratch in (alive, dead):
        (scratch.folder / "run-1").mkdir()
    dead._lock.release()  # as the kernel does when the process is killed
    own = Scratch(tmp_path, "generator-c")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "generator-a",
        "generator-c",
    ]
    assert (alive.folder / "run-1").is_dir()
    own.close()
    alive.close()
