"""A policy that has unlearned to end its completions."""

import httpx

from offbeat.contracts.leases import CompleteRequest
from services.orchestrator.clipping import CLIPPED_RATIO, has_set_in
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


def test_it_has_set_in_with_the_fifth_step_over_the_limit() -> None:
    over = [0.95] * 5
    assert has_set_in(over)
    assert has_set_in([0.9, *over])
    assert not has_set_in([0.95, *over]), "it was told at the step before"
    assert not has_set_in(over[1:])
    assert not has_set_in([*over[1:], 0.9])
    assert not has_set_in([])


def test_s12_a_policy_that_ends_no_completion_is_told_once_each_time(
    orchestrator: Orchestrator, http: httpx.Client
) -> None:
    ratios = [0.5, *[1.0] * 6, 0.2, *[0.91] * 5]
    run_id = submit(http, train={"steps": len(ratios)}, staleness={"max_versions": 0})
    hand = Hand(orchestrator)
    set_up(hand)
    for ratio in ratios:
        hand.work(GENERATOR)
        lease = hand.leased(TRAINER)
        output = plausible_output(lease)
        assert output.kind == "train"
        manifest = output.manifest.model_copy(update={"metrics": {CLIPPED_RATIO: ratio}})
        request = CompleteRequest(
            attempt=lease.attempt,
            worker_id="hand",
            output=output.model_copy(update={"manifest": manifest}),
        )
        orchestrator.worker.complete(lease.job_id, request)
    told = [event for event in events(http, run_id) if event["kind"] == "completions_clipped"]
    assert [(event["level"], event["data"]["step"]) for event in told] == [
        ("warning", 6),
        ("warning", 13),
    ]
    shown = http.get(f"/v1/runs/{run_id}/metrics", params={"name": CLIPPED_RATIO}).json()
    assert [point["value"] for point in shown["series"][CLIPPED_RATIO]] == ratios
