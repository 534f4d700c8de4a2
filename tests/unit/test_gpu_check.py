"""The figures of `make gpu-check`, from a run whose numbers are known."""

import pytest

from offbeat.contracts.runs import MetricPoint, MetricSeries
from scripts.bench.matmul import Layers
from scripts.gpu_check import DRY_SIZE, Figures, card_of, figures, settings_of, spec_of

LAYERS = Layers(linears=((4, 8),), num_blocks=2, head=(10, 4))
SERIES = {
    "perf/step_s": [9.0, 2.0, 2.0],
    "perf/trained_tok_s": [1.0, 50.0, 50.0],
    "batch/forwarded_tokens_per_step": [300.0, 300.0, 300.0],
    "reward": [0.25, 0.5, 0.75],
}


def _metrics() -> MetricSeries:
    return MetricSeries(
        run_id="run-gpu",
        series={
            name: tuple(
                MetricPoint(step=step, value=value) for step, value in enumerate(values, start=1)
            )
            for name, values in SERIES.items()
        },
    )


def _found(device: str, engine: str) -> Figures:
    return figures(
        device=device,
        engine=engine,
        spec=spec_of(DRY_SIZE),
        metrics=_metrics(),
        events=[],
        wall_s=20.0,
        layers=LAYERS,
        measured_bytes=5,
    )


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA L40S", "L40S"),
        ("cpu", None),
    ],
)
def test_a_card_is_known_by_the_name_that_cuda_gives_it(device: str, card: str | None) -> None:
    assert card_of(device) == card


def test_rates_leave_out_the_first_step_and_mfu_counts_what_a_step_multiplies() -> None:
    found = _found("NVIDIA H200", "vllm")
    # A token: 2 blocks × (2 × 4 × 8 + 3 × 16 × (4 + 8)) = 1,280 products; the head: 2 × 10 × 4.
    flops = 2 * (1280 * 300 + 80 * 100)
    assert found.step_s == 2.0
    assert found.trained_tokens_per_s == 50.0
    assert found.forwarded_tokens_per_s == 150.0
    assert found.mfu == pytest.approx(flops / 2.0 / 989e12)
    assert (found.reward_first, found.reward_last, found.steps) == (0.25, 0.75, 3)
    assert found.publish_to_served_s is None
    assert found.planned_bytes is not None


def test_a_cpu_has_no_peak_and_no_plan() -> None:
    found = _found("cpu", "transformers")
    assert (found.mfu, found.planned_bytes) == (None, None)


def test_vllm_leaves_memory_to_the_trainer_and_a_dry_run_the_card_to_others() -> None:
    assert settings_of(is_dry=False) == {"OFFBEAT_VLLM_ARGS": "--gpu-memory-utilization 0.4"}
    assert settings_of(is_dry=True) == {
        "OFFBEAT_DEVICE": "cpu",
        "OFFBEAT_VLLM_ARGS": "--gpu-memory-utilization 0.2",
    }
