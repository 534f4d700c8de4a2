"""The garbage collector, on the real store and both databases; deleted runs; what the API says."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, insert, select
from typer.testing import CliRunner, Result

from offbeat import keys
from offbeat.cli.main import app
from offbeat.contracts.weights import Manifest
from offbeat.errors import UnavailableError
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from services.orchestrator.collector import LATE_WRITES_S, Collector
from services.orchestrator.schema import Base, EventRow, MetricRow, RunRow
from services.orchestrator.tidying import EVENTS_KEPT, OWNED, prune_run
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    LaterClock,
    Orchestrator,
    running_orchestrator,
    set_up,
    status,
    submit,
)
from tests.waiting import wait_until

DAY_S = 86_400.0
STATE = "trainer_state.safetensors"
PUT_THREADS = 16


@dataclass
class Setting:
    """An orchestrator whose test plays the workers, and what the weight-proxy was told."""

    orchestrator: Orchestrator
    http: httpx.Client
    store: S3ObjectStore
    clock: LaterClock
    """Beside the real time, since listings of the store carry the store's own."""
    forgotten: list[str] = field(default_factory=list)

    @property
    def collector(self) -> Collector:
        return self.orchestrator.collector

    def left(self, run_id: str) -> set[str]:
        return set(self.store.list(keys.run_prefix(run_id)))

    def checkpoints(self, run_id: str) -> list[dict[str, object]]:
        return self.http.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]


@pytest.fixture
def setting(
    tmp_path: Path, database_url: str, empty_broker: str, store: S3ObjectStore
) -> Iterator[Setting]:
    clock = LaterClock()
    forgotten: list[str] = []
    with (
        running_orchestrator(
            tmp_path,
            empty_broker,
            store,
            database_url=database_url,
            clock=clock,
            forget_versions=forgotten.append,
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        yield Setting(running, http, store, clock, forgotten)


def put_all(store: S3ObjectStore, object_keys: list[str]) -> None:
    with ThreadPoolExecutor(PUT_THREADS) as pool:
        list(pool.map(lambda key: store.put(key, b"12345678"), object_keys))


def files_of(manifest: Manifest) -> list[str]:
    return [
        *(keys.version_file(manifest, file.name) for file in manifest.files),
        manifest.prefix + STATE,
    ]


def finished_run(setting: Setting, steps: int, **retention: float) -> tuple[str, list[str]]:
    """A run whose objects lie in the store: its id, and the keys of its samples in order."""
    run_id = submit(
        setting.http,
        train={"steps": steps},
        staleness={"max_versions": 0},
        retention={"keep_last": 1, "keep_last_states": 1, "keep_every": 0, **retention},
    )
    hand = Hand(setting.orchestrator)
    set_up(hand)
    samples: list[str] = []
    for _ in range(steps):
        lease = hand.work(GENERATOR)
        assert lease is not None
        samples.append(keys.rollouts(run_id, lease.job_id, lease.attempt))
        assert hand.work(TRAINER) is not None
    wait_until(lambda: status(setting.http, run_id) == "succeeded")
    versions = [row["prefix"] for row in setting.checkpoints(run_id)]
    names = ("adapter_model.safetensors", "adapter_config.json", STATE)
    put_all(setting.store, [f"{prefix}{name}" for prefix in versions for name in names])
    put_all(setting.store, samples)
    return run_id, samples


def test_old_versions_go_and_the_api_says_what_remains(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 4)
    view = setting.http.post(f"/v1/runs/{run_id}/gc").json()
    # Versions 2 to 4 may still be pulled (two to spare); of the states only the newest is needed.
    assert view == {
        "run_id": run_id,
        "dry_run": False,
        "num_objects": 6,
        "size_bytes": 48,
        "size_bytes_by_reason": {"adapters": 16, "trainer_states": 32},
    }
    remains = [
        (row["version"], row["has_adapter"], row["has_state"], row["size_bytes"])
        for row in setting.checkpoints(run_id)
    ]
    assert remains == [
        (0, True, False, 110),
        (1, False, False, 0),
        (2, True, False, 110),
        (3, True, False, 110),
        (4, True, True, 110),
    ]
    gone = setting.http.get(f"/v1/runs/{run_id}/adapter", params={"version": 1})
    assert gone.status_code == 410
    assert "the adapter of version 1 was removed" in gone.json()["detail"]
    refused = setting.http.post(f"/v1/runs/{run_id}/replays", json={"step": 2})
    assert refused.status_code == 410
    assert "the trainer state of version 1 was removed" in refused.json()["detail"]
    assert setting.http.post(f"/v1/runs/{run_id}/gc").json()["num_objects"] == 0


def test_a_dry_run_removes_and_marks_nothing(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 3)
    before = setting.left(run_id)
    view = setting.http.post(f"/v1/runs/{run_id}/gc", params={"dry_run": True}).json()
    assert (view["dry_run"], view["num_objects"]) == (True, 3)
    assert setting.left(run_id) == before
    assert all(row["has_adapter"] and row["has_state"] for row in setting.checkpoints(run_id))


def test_an_open_replay_keeps_the_state_and_the_samples_it_needs(setting: Setting) -> None:
    run_id, samples = finished_run(setting, 2, rollout_days=1)
    assert setting.http.post(f"/v1/runs/{run_id}/replays", json={"step": 1}).status_code == 202
    setting.clock.offset_s = 2 * DAY_S
    setting.collector.collect(run_id)
    prefix = str(setting.checkpoints(run_id)[0]["prefix"])
    assert {prefix + STATE, samples[0]} <= setting.left(run_id)
    assert samples[1] not in setting.left(run_id)
    refused = setting.http.post(f"/v1/runs/{run_id}/replays", json={"step": 2})
    assert refused.status_code == 410
    page = setting.http.get(f"/v1/runs/{run_id}/rollouts", params={"after": "999999.0"})
    assert page.json()["data"] == []


def test_a_version_that_another_run_starts_from_stays(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 4)
    copy, _ = finished_run(setting, 5)
    submit(setting.http, lora={"init_from": f"{run_id}@1"})
    prefix = setting.checkpoints(copy)[1]["prefix"]
    submit(setting.http, lora={"init_from": f"s3://{setting.store.bucket}/{prefix}"})
    for source, has_adapter in (
        (run_id, [True] * 5),
        (copy, [True, True, False, True, True, True]),
    ):
        setting.collector.collect(source)
        assert [row["has_adapter"] for row in setting.checkpoints(source)] == has_adapter
    refused = setting.http.delete(f"/v1/runs/{run_id}")
    assert refused.status_code == 409
    assert "starts from version 1" in refused.json()["detail"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_p10_a_collection_sees_past_the_first_thousand_objects(setting: Setting) -> None:
    run_id, samples = finished_run(setting, 1)
    lease_of_lost = keys.parse(samples[0])
    assert lease_of_lost is not None
    lost = [keys.rollouts(run_id, lease_of_lost.job_id, 1000 + n) for n in range(2500)]
    put_all(setting.store, lost)
    kept = setting.left(run_id) - set(lost)
    setting.clock.offset_s = 1.5 * DAY_S
    view = setting.collector.collect(run_id)
    assert view.size_bytes_by_reason["debris"] == 8 * 2500
    assert setting.left(run_id) == kept - {
        key for key in kept if STATE in key and "/000000-" in key
    }


class DyingStore(S3ObjectStore):
    """The store of a process that dies after two deletions."""

    left = 2

    def delete(self, key: str) -> None:
        if not self.left:
            raise UnavailableError("the process is dead")
        self.left -= 1
        super().delete(key)


def test_a_collection_that_died_is_finished_by_the_next_one(
    setting: Setting, s3_settings: ObjectStoreSettings
) -> None:
    run_id, _ = finished_run(setting, 4)
    dying = Collector(
        store=setting.orchestrator.store,
        objects=DyingStore.connect(s3_settings),
        forget_versions=setting.forgotten.append,
        clock=setting.clock,
        interval_s=1.0,
    )
    before = setting.left(run_id)
    with pytest.raises(UnavailableError, match="dead"):
        dying.collect(run_id)
    assert len(before - setting.left(run_id)) == 2
    # What was going to go is refused already, whether its objects are still there or not.
    gone = setting.http.get(f"/v1/runs/{run_id}/adapter", params={"version": 1})
    assert gone.status_code == 410
    setting.collector.collect(run_id)
    assert len(before - setting.left(run_id)) == 6


def test_the_collector_looks_at_what_is_due(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 4)
    setting.collector.collect_due()
    assert len(setting.left(run_id)) == 19 - 6

    def collected_at() -> float | None:
        with setting.orchestrator.store.read() as session:
            return session.scalar(select(RunRow.collected_at).where(RunRow.id == run_id))

    first = collected_at()
    setting.clock.offset_s = 0.9 * DAY_S
    setting.collector.collect_due()
    assert collected_at() == first, "a run that has ended is looked through once a day"
    setting.clock.offset_s = 1.1 * DAY_S
    setting.collector.collect_due()
    assert collected_at() != first


def test_a_deleted_run_leaves_nothing(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 2)
    other, _ = finished_run(setting, 1)
    others = setting.left(other)
    assert setting.http.delete(f"/v1/runs/{run_id}").status_code == 204
    assert setting.http.get(f"/v1/runs/{run_id}").status_code == 404
    assert setting.http.post(f"/v1/runs/{run_id}/retry").status_code == 404
    assert [run["id"] for run in setting.http.get("/v1/runs").json()["data"]] == [other]
    setting.collector.collect_due()
    assert setting.left(run_id) == set()
    late = keys.rollouts(run_id, "job-late", 1)
    setting.store.put(late, b"a stalled worker's")
    setting.clock.offset_s = LATE_WRITES_S + 1
    setting.collector.collect_due()
    assert setting.left(run_id) == set()
    assert setting.forgotten == [run_id]
    with setting.orchestrator.store.read() as session:
        for name in OWNED:
            rows = select(func.count()).where(Base.metadata.tables[name].c.run_id == run_id)
            assert session.scalar(rows) == 0
        assert session.scalar(select(func.count()).where(RunRow.id == run_id)) == 0
    assert others <= setting.left(other) | {key for key in others if STATE in key}
    assert status(setting.http, other) == "succeeded"


def test_a_run_that_goes_on_cannot_be_deleted(setting: Setting) -> None:
    run_id = submit(setting.http)
    refused = setting.http.delete(f"/v1/runs/{run_id}")
    assert refused.status_code == 409
    assert "cancel it, then delete it" in refused.json()["detail"]
    setting.http.post(f"/v1/runs/{run_id}/cancel")
    assert setting.http.delete(f"/v1/runs/{run_id}").status_code == 204


def test_every_table_of_a_run_is_emptied_with_it() -> None:
    runs = Base.metadata.tables["runs"]
    owned = {
        name
        for name, table in Base.metadata.tables.items()
        if any(key.column.table is runs for key in table.foreign_keys)
    }
    assert owned == OWNED.keys()


def test_the_oldest_events_and_the_values_between_go(setting: Setting) -> None:
    run_id = submit(setting.http)
    with setting.orchestrator.store.write() as session:
        event = {"run_id": run_id, "at": 1.0, "level": "info", "kind": "x", "message": "x"}
        session.execute(insert(EventRow), [{**event, "data": "{}"}] * (EVENTS_KEPT + 50))
        session.execute(
            insert(MetricRow),
            [
                {"run_id": run_id, "name": name, "step": step, "value": 1.0}
                for name in ("reward", "eval/reward")
                for step in (*range(1, 31), 5_000, 10_030)
            ],
        )
        run = session.scalars(select(RunRow).where(RunRow.id == run_id)).one()
        run.version = 10_025
        prune_run(session, run)
        run.version = None
    with setting.orchestrator.store.read() as session:
        events = select(func.count()).where(EventRow.run_id == run_id)
        assert session.scalar(events) == EVENTS_KEPT
        steps = select(MetricRow.step).where(MetricRow.run_id == run_id).order_by(MetricRow.step)
        kept = session.scalars(steps.where(MetricRow.name == "reward")).all()
        assert kept == [10, 20, 26, 27, 28, 29, 30, 5_000, 10_030]
        evaluations = session.scalars(steps.where(MetricRow.name == "eval/reward")).all()
        assert len(evaluations) == 32


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_command_line_collects_and_deletes(setting: Setting) -> None:
    run_id, _ = finished_run(setting, 3)

    def offbeat(*arguments: str, typed: str = "") -> Result:
        environment = {"OFFBEAT_URL": setting.orchestrator.url}
        return CliRunner().invoke(app, list(arguments), input=typed, env=environment)

    planned = offbeat("gc", run_id, "--dry-run")
    assert planned.stdout.splitlines() == [
        "3 objects of 24 bytes would be removed.",
        "  trainer_states               24 bytes",
    ]
    answer = json.loads(offbeat("gc", run_id, "--dry-run", "--json").stdout)
    assert (answer["num_objects"], answer["dry_run"]) == (3, True)
    assert offbeat("gc", run_id).exit_code == 0
    assert [row["has_state"] for row in setting.checkpoints(run_id)] == [False, False, False, True]
    assert offbeat("delete", run_id, typed="n\n").exit_code == 1
    assert status(setting.http, run_id) == "succeeded"
    deleted = offbeat("delete", run_id, typed="y\n")
    assert (deleted.exit_code, setting.http.get(f"/v1/runs/{run_id}").status_code) == (0, 404)
    again = offbeat("delete", run_id, "--yes")
    assert again.exit_code == offbeat("show", run_id).exit_code != 0
