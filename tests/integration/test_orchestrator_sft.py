"""Supervised runs over HTTP, with a trainer that the test plays and no generator at all."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from offbeat.client import OffbeatClient
from offbeat.contracts.jobs import JobKind, TrainInput
from offbeat.contracts.leases import HeartbeatRequest
from offbeat.errors import ConflictError, IntegrityError
from offbeat.objects import S3ObjectStore
from services.orchestrator.store import lock_run
from services.orchestrator.usage import load_facts
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    Orchestrator,
    events,
    kinds,
    status,
    submit_spec,
)
from tests.plausible import MODEL
from tests.specs import sft_spec_dict
from tests.waiting import wait_until


def submit(http: httpx.Client, **changes: Any) -> str:
    """Submit a small supervised run with these changes; its id."""
    return submit_spec(http, sft_spec_dict(**changes))


def test_a_whole_run_with_a_trainer_alone(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http, data={"eval_size": 2}, eval={"every_steps": 2})
    hand = Hand(orchestrator)
    hand.report(TRAINER)
    done = [hand.work(TRAINER) for _ in range(5)]
    assert [lease.input.kind for lease in done if lease] == [
        JobKind.TOKENIZE,
        JobKind.INIT,
        JobKind.TRAIN,
        JobKind.TRAIN,
        JobKind.TRAIN,
    ]
    wait_until(lambda: status(http, run_id) == "succeeded")
    assert hand.message(GENERATOR, wait_s=0.1) is None
    assert kinds(http, run_id) == [
        "run_created",
        "run_started",
        "examples_ready",
        *["version_published"] * 4,
        "run_succeeded",
    ]
    [ready] = [event for event in events(http, run_id) if event["kind"] == "examples_ready"]
    assert ready["message"] == (
        "8 training and 2 held-out examples are ready. The loss is taken on 40 tokens of an epoch. "
        "Cut off at sft.max_length: 1."
    )
    series = http.get(f"/v1/runs/{run_id}/metrics").json()["series"]
    assert series["loss"] == [
        {"step": 1, "value": 1.0},
        {"step": 2, "value": 0.5},
        {"step": 3, "value": 1 / 3},
    ]
    assert series["eval_loss"] == [
        {"step": 0, "value": 4.0},
        {"step": 2, "value": 2.0},
        {"step": 3, "value": 1.0},
    ]
    progress = http.get(f"/v1/runs/{run_id}").json()["progress"]
    assert (progress["step"], progress["version"], progress["loss"]) == (3, 3, 1 / 3)
    checkpoints = http.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    assert [checkpoint["version"] for checkpoint in checkpoints] == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_has_its_turn_once_an_epoch(
    orchestrator: Orchestrator, http: httpx.Client, shuffle: bool
) -> None:
    """Two epochs of eight examples, four a step; each step names where the data lies."""
    submit(http, data={"shuffle": shuffle}, train={"steps": 4})
    hand = Hand(orchestrator)
    prepared, _, *steps = [hand.work(TRAINER) for _ in range(6)]
    assert prepared is not None
    rows: list[tuple[int, ...]] = []
    for base_version, lease in enumerate(steps):
        assert lease is not None
        step = lease.input
        assert isinstance(step, TrainInput)
        assert step.base_version == base_version
        assert step.examples is not None
        assert step.examples.examples_key.startswith(f"runs/{lease.run_id}/prompts/")
        rows.append(step.examples.rows)
    epochs = [(*rows[0], *rows[1]), (*rows[2], *rows[3])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert (epochs[0] == tuple(range(8))) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle


def test_the_next_step_begins_beside_the_hand_in_of_the_last(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    submit(http)
    hand = Hand(orchestrator)
    hand.work(TRAINER)
    hand.work(TRAINER)
    first = hand.leased(TRAINER)
    request = HeartbeatRequest(attempt=first.attempt, worker_id="hand", computed=True)
    orchestrator.worker.heartbeat(first.job_id, request)
    second = hand.leased(TRAINER)
    assert isinstance(second.input, TrainInput)
    assert second.input.base_version == 1
    hand.complete(first)
    hand.complete(second)


def test_pause_resume_and_cancel(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    hand.work(TRAINER)
    hand.work(TRAINER)
    step = hand.leased(TRAINER)
    assert http.post(f"/v1/runs/{run_id}/pause").json()["status"] == "paused"
    hand.complete(step)
    assert hand.message(TRAINER, wait_s=0.5) is None
    assert http.post(f"/v1/runs/{run_id}/resume").json()["status"] == "running"
    step = hand.leased(TRAINER)
    assert http.post(f"/v1/runs/{run_id}/cancel").json()["status"] == "cancelled"
    with pytest.raises(ConflictError):
        hand.complete(step)
    assert http.post(f"/v1/runs/{run_id}/retry").json()["status"] == "running"
    again = hand.leased(TRAINER)
    assert again.input == step.input


def test_bad_data_fails_the_run_before_any_other_work(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    lease = hand.leased(TRAINER)
    hand.fail(lease, "row 3: 'text' is empty: drop the row", permanent=True)
    wait_until(lambda: status(http, run_id) == "failed")
    reason = http.get(f"/v1/runs/{run_id}").json()["status_reason"]
    assert reason == "its tokenize job failed: row 3: 'text' is empty: drop the row"


def test_a_wrong_inline_row_is_refused_at_the_door(http: httpx.Client) -> None:
    raw = sft_spec_dict()
    raw["data"]["rows"][2] = {"prompt": "a"}
    response = http.post("/v1/runs", json=raw)
    assert response.status_code == 422
    assert "row 2: neither 'prompt' and 'completion'" in response.json()["detail"]


def test_a_run_waits_for_a_trainer_and_for_nobody_else(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    wait_until(lambda: status(http, run_id) == "running")
    verdict = http.get(f"/v1/runs/{run_id}/diagnosis").json()["verdict"]
    assert verdict.startswith("No trainer of pool 'default' takes jobs")
    Hand(orchestrator).report(TRAINER)
    verdict = http.get(f"/v1/runs/{run_id}/diagnosis").json()["verdict"]
    assert verdict == "The run is being set up: no step is done yet."


def test_the_version_with_the_lowest_validation_loss_stays(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Nothing waits for an evaluation by a generator."""
    run_id = submit(http, data={"eval_size": 2}, eval={"every_steps": 1})
    hand = Hand(orchestrator)
    for _ in range(5):
        hand.work(TRAINER)
    wait_until(lambda: status(http, run_id) == "succeeded")
    with orchestrator.store.write() as session:
        facts = load_facts(session, lock_run(session, run_id), [])
    assert facts.used_adapters == {3}


def full_run(orchestrator: Orchestrator, http: httpx.Client) -> tuple[str, Hand]:
    """A submitted run of full fine-tuning, and who does its jobs."""
    raw = sft_spec_dict()
    del raw["lora"]
    run_id = submit_spec(http, raw)
    hand = Hand(orchestrator)
    hand.report(TRAINER)
    for _ in range(3):
        hand.work(TRAINER)
    return run_id, hand


def test_the_model_of_full_fine_tuning_is_listed_and_downloaded(
    orchestrator: Orchestrator, http: httpx.Client, store: S3ObjectStore, tmp_path: Path
) -> None:
    run_id, hand = full_run(orchestrator, http)
    early = http.get(f"/v1/runs/{run_id}/model")
    assert early.status_code == 404
    assert early.json()["detail"] == (
        f"run {run_id} is running and has written no model: that is what its last step does"
    )
    for _ in range(2):
        hand.work(TRAINER)
    wait_until(lambda: status(http, run_id) == "succeeded")
    model = http.get(f"/v1/runs/{run_id}/model").json()
    assert model["version"] == 3
    assert [file["name"] for file in model["files"]] == list(MODEL)
    for name, body in MODEL.items():
        store.put(model["prefix"] + name, body)
        assert http.get(f"/v1/runs/{run_id}/model/{name}").content == body
    assert http.get(f"/v1/runs/{run_id}/model/other.json").status_code == 404
    assert http.get(f"/v1/runs/{run_id}/model/..%2Fx").status_code in (404, 422)

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"broken")
    with OffbeatClient(orchestrator.url) as client:
        client.download_model(run_id, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL
        store.put(model["prefix"] + "config.json", b"[]")
        (folder / "config.json").unlink()
        with pytest.raises(IntegrityError, match=r"config.json is not what the run has written"):
            client.download_model(run_id, folder)
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_full_fine_tuning_has_no_adapter_to_fetch_or_to_talk_to(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id, _ = full_run(orchestrator, http)
    adapter = http.get(f"/v1/runs/{run_id}/adapter")
    assert (adapter.status_code, adapter.json()["detail"]) == (
        404,
        f"run {run_id} trains all weights and has no adapter: /v1/runs/{run_id}/model has what its "
        "last step writes",
    )
    chat = http.post(
        "/v1/chat/completions",
        json={"model": run_id, "messages": [{"role": "user", "content": "2 + 2 ="}]},
    )
    assert chat.status_code == 404
    assert "trains all weights, and generators serve adapters" in chat.json()["error"]["message"]
    assert http.get("/v1/models").json()["data"] == []
    [newest] = http.get(f"/v1/runs/{run_id}/checkpoints").json()["data"][-1:]
    assert (newest["has_adapter"], newest["has_state"]) == (False, True)
    other = submit(http)
    assert http.get(f"/v1/runs/{other}/model").status_code == 404
