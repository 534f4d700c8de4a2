"""A worker that hands a result in beside its next job: real orchestrator, handlers by the test."""

import threading

import httpx

from offbeat.contracts.jobs import JobKind, JobMessage
from offbeat.errors import UnavailableError
from offbeat.worker import HandIn, JobContext, JobRunner
from tests.orchestrator import (
    GENERATOR,
    TRAINER,
    Hand,
    Orchestrator,
    events,
    plausible_output,
    set_up,
    submit,
)
from tests.waiting import wait_until


def train_messages(orchestrator: Orchestrator, http: httpx.Client) -> tuple[str, Hand, JobMessage]:
    """A run whose first train job waits, and the rollouts of the second are there."""
    run_id = submit(http)
    hand = Hand(orchestrator)
    set_up(hand)
    hand.work(GENERATOR)
    message = hand.message(TRAINER)
    assert message is not None
    hand.work(GENERATOR)
    return run_id, hand, message


def versions(http: httpx.Client, run_id: str) -> list[object]:
    published = [e for e in events(http, run_id) if e["kind"] == "version_published"]
    return [event["data"]["version"] for event in published]


def test_a_hand_in_runs_beside_the_next_job_and_before_its_hand_in(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id, hand, first = train_messages(orchestrator, http)
    let_go = threading.Event()
    order: list[str] = []

    def train(context: JobContext) -> HandIn:
        name = f"{context.lease.input.kind}-{len(order)}"
        order.append(name)

        def finish() -> object:
            let_go.wait(10)
            order.append(f"handed in {name}")
            return plausible_output(context.lease)

        return HandIn(finish)  # type: ignore[arg-type]

    runner = JobRunner(orchestrator.worker, "hand", {JobKind.TRAIN: train})
    runner.run(first)
    second = hand.message(TRAINER)
    assert second is not None
    assert versions(http, run_id) == [0]
    after = threading.Thread(target=runner.run, args=(second,))
    after.start()
    wait_until(lambda: order == ["train-0", "train-1"])
    let_go.set()
    after.join()
    runner.close()
    assert order == ["train-0", "train-1", "handed in train-0", "handed in train-1"]
    assert versions(http, run_id) == [0, 1, 2]


def test_a_hand_in_that_fails_is_a_failed_attempt(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    run_id, _, message = train_messages(orchestrator, http)

    def finish() -> object:
        raise UnavailableError("the store is down")

    runner = JobRunner(
        orchestrator.worker,
        "hand",
        {JobKind.TRAIN: lambda _: HandIn(finish)},  # type: ignore[arg-type]
    )
    runner.run(message)
    runner.close()
    (requeued,) = [e for e in events(http, run_id) if e["kind"] == "job_requeued"]
    assert requeued["message"].endswith("the store is down")
