"""A run's versions on a vLLM server: store, weight-proxy and canaries are real, the server is the
fake one, which really computes with the adapters."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from offbeat.contracts.leases import WorkerEvent
from offbeat.errors import IntegrityError, LeaseLostError, UnavailableError
from offbeat.objects import S3ObjectStore
from services.generator.engines.base import SampleRequest, Sampling
from services.generator.engines.vllm import VllmEngine
from services.generator.weights import RunPolicies
from tests.fake_vllm import FakeVllm
from tests.policies import PROMPT_IDS, Reference, upload_policy
from tests.vllm_engine import MODEL, vllm_engine
from tests.waiting import wait_until
from tests.weight_proxy import RunningProxy

SPARE_MAX = 1
GREEDY = Sampling(max_new_tokens=8, temperature=0.0)
REQUESTS = [SampleRequest(prompt_ids=PROMPT_IDS, seeds=(0,))]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@dataclass(kw_only=True)
class Setting:
    """One run, and one generator that follows it."""

    run_id: str
    store: S3ObjectStore
    proxy: RunningProxy
    reference: Reference
    fake: FakeVllm
    url: str
    model_folder: Path
    folder: Path
    engine: VllmEngine = field(init=False)
    policies: RunPolicies = field(init=False)
    events: list[WorkerEvent] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """What was published: the engine's name to the hash."""

    def start(self) -> None:
        self.engine = vllm_engine(self.url, self.model_folder, self.folder)
        self.policies = RunPolicies(
            self.run_id,
            engine=self.engine,
            model=MODEL,
            proxy=self.proxy.client,
            tell=self.events.append,
            folder=self.folder,
            spare_max=SPARE_MAX,
        )
        self.policies.start()

    def stop(self) -> None:
        self.policies.close()
        self.engine.close()

    def publish(self, version: int, *, canary_of: int | None = None) -> None:
        canary = self.reference.canary(version if canary_of is None else canary_of)
        manifest = upload_policy(self.store, self.run_id, version, canary)
        self.proxy.client.publish(manifest)
        self.digests[self.name(version)] = manifest.adapter_sha256

    def serve(self, version: int) -> None:
        """Publish it and wait until a job could use it."""
        self.publish(version)
        with self.policies.newest(version, timeout_s=60):
            pass

    def name(self, version: int) -> str:
        return f"{self.run_id}-v{version}"

    @property
    def serving(self) -> dict[int, str]:
        return {served.version: served.adapter_sha256 for served in self.policies.serving()}

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    @property
    def folders(self) -> int:
        return len(list(self.folder.glob(f"{self.run_id}/*")))


@pytest.fixture
def setting(
    proxy: RunningProxy,
    store: S3ObjectStore,
    reference: Reference,
    vllm_server: tuple[FakeVllm, str],
    tiny_model: Path,
    tmp_path: Path,
    run_id: str,
) -> Iterator[Setting]:
    fake, url = vllm_server
    fake.reset()
    setting = Setting(
        run_id=run_id,
        store=store,
        proxy=proxy,
        reference=reference,
        fake=fake,
        url=url,
        model_folder=tiny_model,
        folder=tmp_path / "adapters",
    )
    setting.start()
    yield setting
    setting.stop()


def test_a_published_version_is_loaded_proved_and_used(setting: Setting) -> None:
    setting.serve(0)
    setting.serve(1)
    with setting.policies.newest(1) as policy:
        ((completion,),) = setting.engine.generate(REQUESTS, policy.name, GREEDY)
        assert completion.ids == setting.reference.canary(1).completion_ids
    separations = [event.data["canary_separation"] for event in setting.events]
    assert separations == [None, pytest.approx(1, abs=0.05)]


def test_a_job_that_is_taken_away_does_not_wait_for_a_server_that_starts(
    setting: Setting,
) -> None:
    def taken() -> None:
        raise LeaseLostError("taken")

    setting.fake.starting = True
    for lent in (
        setting.policies.newest(0, check=taken),
        setting.policies.exact(0, check=taken),
    ):
        with pytest.raises(LeaseLostError):
            lent.__enter__()


def test_w2_the_version_that_is_served_can_be_read_back_with_its_hash(setting: Setting) -> None:
    """Also by a process that comes after; nothing counts as served before it was proved here."""
    setting.serve(0)
    setting.serve(1)
    assert setting.serving == {v: setting.digests[setting.name(v)] for v in (0, 1)}
    setting.stop()
    setting.start()
    assert setting.serving == {}
    with setting.policies.newest(1, timeout_s=60):
        assert setting.serving == {1: setting.digests[setting.name(1)]}


def test_w3_a_version_that_is_not_listed_is_not_served(setting: Setting) -> None:
    setting.serve(0)
    setting.fake.loads_lost = 2
    setting.publish(1)
    wait_until(lambda: setting.fake.loads_lost == 0)
    assert set(setting.serving) == {0}
    with setting.policies.newest(1, timeout_s=60) as policy:
        assert policy.name in setting.fake.roots
        setting.engine.generate(REQUESTS, policy.name, GREEDY)
    assert setting.fake.bodies[-1]["model"] == setting.name(1)


def test_w4_a_version_whose_name_leads_to_the_old_one_is_refused(setting: Setting) -> None:
    for version in (0, 1):
        setting.serve(version)
    setting.fake.routes_to = setting.name(1)
    setting.publish(2)
    wait_until(lambda: "canary_failed" in setting.kinds)
    assert set(setting.serving) == {0, 1}
    assert setting.engine.loaded() == {setting.name(0), setting.name(1)}


def test_w5_w6_a_server_that_answers_from_the_base_is_refused(setting: Setting) -> None:
    """Version 1 has answers of its own; who gives those of version 0 has not applied it."""
    setting.serve(0)
    setting.fake.routes_to = setting.fake.served_name
    setting.publish(1)
    wait_until(lambda: "canary_failed" in setting.kinds)
    assert set(setting.serving) == {0}


@pytest.mark.parametrize("fault", ["loads_failed", "loads_lost"])
def test_w8_a_load_that_fails_does_not_move_the_version(setting: Setting, fault: str) -> None:
    setting.serve(0)
    setattr(setting.fake, fault, 1)
    setting.publish(1)
    wait_until(lambda: getattr(setting.fake, fault) == 0)
    assert set(setting.serving) == {0}
    with setting.policies.newest(1, timeout_s=60):
        assert set(setting.serving) == {0, 1}
    wait_until(lambda: setting.kinds == ["version_served", "version_served"])


def test_an_adapter_that_the_server_refuses_is_reported_with_its_reason(setting: Setting) -> None:
    setting.serve(0)
    setting.fake.loads_refused = "unsupported module"
    setting.publish(1)
    wait_until(lambda: "canary_failed" in setting.kinds)
    assert "vLLM refuses the adapter: unsupported module" in setting.events[-1].message
    assert set(setting.serving) == {0}


def test_w1_l2_l3_many_versions_are_read_once_and_all_let_go(setting: Setting) -> None:
    """No name ever has two contents, and neither the server's table nor the disk grows."""
    num_versions = 24
    for version in range(num_versions):
        setting.serve(version)
    newest = [setting.name(num_versions - 2), setting.name(num_versions - 1)]
    wait_until(lambda: list(setting.fake.roots) == newest)
    wait_until(lambda: setting.folders == 1 + SPARE_MAX)
    contents = [(name, digest) for name, digest in setting.fake.contents if "probe" not in name]
    assert contents == [
        (setting.name(v), setting.digests[setting.name(v)]) for v in range(num_versions)
    ]
    assert {setting.fake.reads[setting.name(v)] for v in range(num_versions)} == {1}
    unloaded = [name for name in setting.fake.unloads if "probe" not in name]
    assert unloaded == [setting.name(v) for v in range(num_versions - 2)]


def test_l5_files_stay_until_the_server_has_unloaded_the_adapter(setting: Setting) -> None:
    for version in (0, 1):
        setting.serve(version)
    folder = setting.fake.roots[setting.name(0)]
    setting.fake.unloads_failed = 1
    setting.serve(2)
    wait_until(lambda: setting.fake.unloads_failed == 0)
    assert set(setting.serving) == {1, 2}
    assert (setting.fake.roots[setting.name(0)], folder.is_dir()) == (folder, True)
    with setting.policies.exact(0) as policy:
        assert policy.folder == folder, "it was unloaded, removed and pulled anew"
    assert setting.fake.reads[setting.name(0)] == 2


def test_l7_a_long_job_keeps_its_version_while_others_come(setting: Setting) -> None:
    setting.serve(0)
    setting.serve(1)
    before = setting.engine.generate(REQUESTS, setting.name(1), GREEDY)
    setting.fake.hangs = True
    with (
        setting.policies.newest(1) as policy,
        ThreadPoolExecutor(1) as pool,
    ):
        answering = pool.submit(setting.engine.generate, REQUESTS, policy.name, GREEDY)
        wait_until(lambda: setting.fake.running == 1)
        setting.fake.hangs = False
        for version in range(2, 9):
            setting.serve(version)
        assert answering.result() == before
        assert setting.engine.generate(REQUESTS, policy.name, GREEDY) == before
        assert policy.folder.is_dir()
    setting.serve(9)
    wait_until(lambda: setting.name(1) not in setting.fake.roots)
    wait_until(lambda: not policy.folder.exists())


def test_l9_a_restarted_server_gets_its_adapter_back_before_a_job_uses_it(
    setting: Setting,
) -> None:
    for version in (0, 1):
        setting.serve(version)
    before = setting.engine.generate(REQUESTS, setting.name(1), GREEDY)
    with setting.policies.newest(1) as policy:
        setting.fake.restart()
        with pytest.raises(UnavailableError, match="vLLM was restarted"):
            setting.engine.generate(REQUESTS, policy.name, GREEDY)
    setting.fake.bodies.clear()
    with setting.policies.newest(1) as policy:
        assert setting.engine.generate(REQUESTS, policy.name, GREEDY) == before
    canary, job = (body for body in setting.fake.bodies if body["model"] == setting.name(1))
    assert (canary["priority"], job["priority"]) == (-1, 0), "it is proved again, then used"
    assert setting.fake.roots == {setting.name(1): policy.folder}
    assert setting.kinds == ["version_served", "version_served"]


def test_l9_a_restarted_server_that_answers_wrongly_is_not_used(setting: Setting) -> None:
    for version in (0, 1):
        setting.serve(version)
    setting.fake.restart()
    setting.fake.routes_to = setting.fake.served_name
    for _ in range(2):
        with pytest.raises(IntegrityError, match="resembles the parent"):
            setting.policies.newest(1).__enter__()
        assert setting.fake.roots == {}
    setting.fake.routes_to = None
    with setting.policies.newest(1) as policy:
        assert list(setting.fake.roots) == [policy.name]
