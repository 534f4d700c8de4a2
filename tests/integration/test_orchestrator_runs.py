"""Whole runs over HTTP, with a worker that the test plays."""

import httpx
import pytest

from offbeat.contracts.jobs import JobKind, TrainInput
from offbeat.contracts.leases import (
    CompleteRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Lease,
    LeaseRequest,
)
from offbeat.contracts.weights import SkippedStep
from offbeat.errors import ConflictError, LeaseLostError
from services.orchestrator.outages import FIRST_WAIT_S
from services.orchestrator.schema import GroupRow, JobRow
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Clock,
    Hand,
    Orchestrator,
    events,
    kinds,
    plausible_output,
    set_up,
    status,
    submit,
)
from tests.waiting import wait_until


def test_a_whole_run(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(
        http,
        data={"eval_size": 2},
        eval={"every_steps": 2},
        staleness={"max_versions": 0},
    )
    hand = Hand(orchestrator)
    done = [hand.work(role) for role in (GENERATOR, TRAINER, GENERATOR, GENERATOR)]
    done += [hand.work(role) for role in (TRAINER, GENERATOR, TRAINER, GENERATOR)]
    assert [lease.input.kind for lease in done if lease] == [
        JobKind.PREPARE,
        JobKind.INIT,
        JobKind.EVALUATE,
        JobKind.GENERATE,
        JobKind.TRAIN,
        JobKind.GENERATE,
        JobKind.TRAIN,
        JobKind.EVALUATE,
    ]
    wait_until(lambda: status(http, run_id) == "succeeded")
    assert kinds(http, run_id) == [
        "run_created",
        "run_started",
        "prompts_ready",
        "version_published",
        "evaluated",
        "version_published",
        "version_published",
        "evaluated",
        "run_succeeded",
    ]
    series = http.get(f"/v1/runs/{run_id}/metrics").json()["series"]
    assert series["reward"] == [{"step": 1, "value": 0.25}, {"step": 2, "value": 0.5}]
    assert series["eval/reward"] == [{"step": 0, "value": 0.5}, {"step": 2, "value": 0.5}]
    assert series["rollout/generated_tok_s"] == [
        {"step": 1, "value": 6.0},
        {"step": 2, "value": 6.0},
    ]
    progress = http.get(f"/v1/runs/{run_id}").json()["progress"]
    assert (progress["step"], progress["version"], progress["reward"]) == (2, 2, 0.5)
    checkpoints = http.get(f"/v1/runs/{run_id}/checkpoints").json()["data"]
    assert [checkpoint["version"] for checkpoint in checkpoints] == [0, 1, 2]
    with orchestrator.store.read() as session:
        groups = session.query(GroupRow).order_by(GroupRow.index).all()
        assert [(g.index, g.status, g.trained_step) for g in groups] == [
            (0, "trained", 1),
            (1, "trained", 1),
            (2, "trained", 2),
            (3, "trained", 2),
        ]


def test_pause_stops_new_work_and_keeps_what_is_under_way(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    under_way = hand.leased(GENERATOR)
    assert http.post(f"/v1/runs/{run_id}/pause").json()["status"] == "paused"
    assert http.post(f"/v1/runs/{run_id}/pause").status_code == 200
    void = hand.message(GENERATOR, wait_s=1)
    if void is not None:
        with pytest.raises(ConflictError):
            orchestrator.worker.lease(
                void.job_id, LeaseRequest(attempt=void.attempt, worker_id="hand")
            )
    hand.complete(under_way)
    assert hand.message(TRAINER, wait_s=1) is None
    assert http.post(f"/v1/runs/{run_id}/resume").json()["status"] == "running"
    train = hand.leased(TRAINER)
    assert train.input.kind == "train"


def computed(orchestrator: Orchestrator, held: Lease) -> HeartbeatReply:
    """Say that only the hand-in of the job is left."""
    request = HeartbeatRequest(attempt=held.attempt, worker_id="hand", computed=True)
    return orchestrator.worker.heartbeat(held.job_id, request)


def hold_a_step(orchestrator: Orchestrator, http: httpx.Client) -> tuple[Hand, Lease]:
    """A run whose first step is leased while the groups of the second are there."""
    submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    first = hand.leased(TRAINER)
    hand.work(GENERATOR)
    return hand, first


def test_the_next_step_begins_while_a_computed_one_is_handed_in(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    hand, first = hold_a_step(orchestrator, http)
    assert hand.message(TRAINER, wait_s=0.5) is None
    (waiting,) = computed(orchestrator, first).waiting_rollouts
    second = hand.leased(TRAINER)
    assert isinstance(second.input, TrainInput)
    assert second.input.base_version == 1
    assert {group.rollouts_key for group in second.input.groups} == {waiting}
    hand.complete(first)
    hand.complete(second)


def test_a_step_waits_again_when_the_hand_in_before_it_failed(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    """Its message is void until the step before it is computed again."""
    hand, first = hold_a_step(orchestrator, http)
    computed(orchestrator, first)
    message = hand.message(TRAINER)
    assert message is not None
    hand.fail(first, "the store is down")
    for attempt in (1, 2):
        with pytest.raises(LeaseLostError):
            orchestrator.worker.lease(
                message.job_id, LeaseRequest(attempt=attempt, worker_id="hand")
            )
    done = [hand.work(TRAINER), hand.work(TRAINER)]
    assert [(lease.job_id, lease.attempt) for lease in done if lease] == [
        (first.job_id, 2),
        (message.job_id, 2),
    ]


@pytest.mark.parametrize("outage", [False, True])
def test_a_step_that_waits_for_a_lost_one_is_taken_back(
    orchestrator: Orchestrator, http: httpx.Client, outage: bool
) -> None:
    """Its trainer may be the only one, and has to take the lost one again."""
    hand, first = hold_a_step(orchestrator, http)
    computed(orchestrator, first)
    second = hand.leased(TRAINER)
    hand.fail(first, "the store is down", outage=outage)
    assert "job_taken_back" in kinds(http, first.run_id)
    with pytest.raises(LeaseLostError):
        orchestrator.worker.heartbeat(
            second.job_id, HeartbeatRequest(attempt=second.attempt, worker_id="hand")
        )
    orchestrator.pass_time(FIRST_WAIT_S)
    done = [hand.work(TRAINER), hand.work(TRAINER)]
    assert [(lease.job_id, lease.attempt) for lease in done if lease] == [
        (first.job_id, 2),
        (second.job_id, 2),
    ]


def test_cancel_takes_the_jobs_from_their_workers(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    held = hand.leased(GENERATOR)
    assert http.post(f"/v1/runs/{run_id}/cancel").json()["status"] == "cancelled"
    with pytest.raises(LeaseLostError):
        orchestrator.worker.heartbeat(
            held.job_id, HeartbeatRequest(attempt=held.attempt, worker_id="hand")
        )
    with pytest.raises(LeaseLostError):
        hand.complete(held)
    dropped = [e for e in events(http, run_id) if e["kind"] == "groups_dropped"]
    assert [event["data"]["reason"] for event in dropped] == ["run_ended"]
    assert http.post(f"/v1/runs/{run_id}/pause").status_code == 409


def test_retry_goes_on_from_the_last_version(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, staleness={"max_versions": 0})
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    hand.work(TRAINER)
    hand.leased(GENERATOR)
    http.post(f"/v1/runs/{run_id}/cancel")
    assert http.post(f"/v1/runs/{run_id}/retry").json()["status"] == "running"
    hand.work(GENERATOR)
    last = hand.work(TRAINER)
    assert last is not None
    assert last.input.kind == "train"
    assert last.input.base_version == 1
    wait_until(lambda: status(http, run_id) == "succeeded")


def test_a_limit_on_worker_time_ends_the_run(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, limits={"max_gpu_seconds": 5})
    hand = Hand(orchestrator)
    lease = hand.leased(GENERATOR)
    assert isinstance(orchestrator.clock, Clock)
    orchestrator.clock.now += 6
    hand.complete(lease)
    wait_until(lambda: status(http, run_id) == "failed")
    with orchestrator.store.read() as session:
        assert {job.kind for job in session.query(JobRow)} == {"prepare"}


def test_dynamic_sampling_says_when_it_gives_up(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    rollout = {"dynamic_sampling": True, "oversampling_max": 1.5}
    run_id = submit(http, rollout=rollout, staleness={"max_versions": 0}, train={"steps": 1})
    hand = Hand(orchestrator, reward_std=0.0)
    set_up(hand)
    for _ in range(2):
        hand.work(GENERATOR)
    train = hand.work(TRAINER)
    assert train is not None
    assert train.input.kind == "train"
    assert [group.group_id for group in train.input.groups] == ["g000001", "g000002"]
    wait_until(lambda: status(http, run_id) == "succeeded")
    told = [e["data"] for e in events(http, run_id) if e["kind"] == "dynamic_sampling_gave_up"]
    assert told == [{"group_ids": ["g000001", "g000002"]}]
    series = http.get(f"/v1/runs/{run_id}/metrics").json()["series"]
    assert series["rollout/oversampling"] == [{"step": 1, "value": 1.5}]


def test_a_step_of_a_finished_run_is_replayed(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id = submit(http, train={"steps": 1})
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    trained = hand.work(TRAINER)
    wait_until(lambda: status(http, run_id) == "succeeded")
    too_far = http.post(f"/v1/runs/{run_id}/replays", json={"step": 2})
    assert (too_far.status_code, too_far.json()["detail"]) == (
        404,
        f"run {run_id} has not done step 2 yet",
    )
    asked = http.post(f"/v1/runs/{run_id}/replays", json={"step": 1})
    assert (asked.status_code, asked.json()["is_same"]) == (202, None)
    replayed = hand.work(TRAINER)
    assert trained is not None
    assert replayed is not None
    assert replayed.input.kind == "replay"
    assert trained.input.kind == "train"
    assert replayed.input.groups == trained.input.groups
    answer = http.get(f"/v1/runs/{run_id}/replays/{asked.json()['id']}").json()
    assert (answer["status"], answer["is_same"]) == ("done", False)
    assert kinds(http, run_id)[-1] == "replayed"


def test_a_skipped_step_is_an_event(orchestrator: Orchestrator, http: httpx.Client) -> None:
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    lease = hand.leased(TRAINER)
    output = plausible_output(lease)
    assert output.kind == "train"
    skipped = SkippedStep(reason="the loss is nan", in_a_row=1, batch_key="runs/x/skipped/1.json")
    manifest = output.manifest.model_copy(update={"skipped": skipped})
    output = output.model_copy(update={"manifest": manifest})
    request = CompleteRequest(attempt=1, worker_id="hand", output=output)
    orchestrator.worker.complete(lease.job_id, request)
    told = [event for event in events(http, run_id) if event["kind"] == "step_skipped"]
    assert [(event["level"], event["data"]) for event in told] == [
        ("warning", skipped.model_dump())
    ]
