import pytest

from scripts.bench.sync_engine import LightEngine, light_answer
from scripts.bench.sync_figures import Gaps, Percentiles, figures, table_of


def test_percentiles_interpolate_between_the_two_nearest() -> None:
    seconds = [float(n) for n in range(101)]
    assert Percentiles.of(seconds) == Percentiles(p50_s=50.0, p99_s=99.0)
    assert Percentiles.of([1.0, 2.0]).p99_s == pytest.approx(1.99)


def test_a_gap_belongs_to_a_swap_if_any_part_of_it_does() -> None:
    """The swap lies within the third gap and at the beginning of the fourth."""
    steps = {"a": [0.0, 1.0, 2.0, 5.0, 6.0, 8.0]}
    gaps = Gaps.of(steps, {"a": [(2.5, 5.5)]})
    assert gaps == Gaps(usual_p50_s=1.0, usual_max_s=2.0, swap_max_s=3.0)
    assert gaps.paused_s == 1.0


def test_nothing_paused_where_the_longest_gap_is_away_from_a_swap() -> None:
    steps = {"a": [0.0, 1.0, 2.0], "b": [0.0, 4.0, 5.0]}
    gaps = Gaps.of(steps, {"a": [(0.2, 0.4)], "b": [(4.5, 4.6)]})
    assert (gaps.swap_max_s, gaps.usual_max_s, gaps.paused_s) == (1.0, 4.0, 0.0)


def test_figures_name_every_stage_and_count_reads_of_the_adapter() -> None:
    one = figures(
        case="5 MB x 2",
        engine="light",
        generators=2,
        adapter_bytes=100,
        delays={
            "visible": [0.1, 0.1],
            "loaded": [0.2, 0.2],
            "served": [0.3, 0.5],
            "sampled": [0.6, 0.6],
        },
        upload_s=[1.0, 2.0],
        read_bytes=[100.0, 102.0],
        gaps=Gaps(usual_p50_s=0.01, usual_max_s=0.02, swap_max_s=0.015),
    )
    assert one["published_to_served_p50_s"] == pytest.approx(0.4)
    assert one["published_to_served_p99_s"] == pytest.approx(0.498)
    assert one["published_to_first_sample_p50_s"] == pytest.approx(0.6)
    assert one["s3_reads_per_version"] == pytest.approx(1.01)
    assert (one["versions"], one["paused_s"], one["upload_p50_s"]) == (2, 0.0, 1.5)
    assert table_of([one]).row_count == 1


def test_the_light_engine_answers_by_the_bytes_of_the_adapter() -> None:
    assert light_answer(b"version 1") == light_answer(b"version 1")
    assert light_answer(b"version 1") != light_answer(b"version 2")
    assert LightEngine().loaded() == frozenset()
