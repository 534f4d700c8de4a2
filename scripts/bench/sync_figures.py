"""Figures of the weight-sync benchmark. Pure functions over times in Unix seconds.

Axes: S steps of one generator, G gaps between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from scripts.bench.tables import figure_table

STAGES = ("visible", "loaded", "served", "sampled")
MILLISECOND = 1e-3
MEGABYTE = 1e6

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of a sample of seconds."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Percentiles":
        """Linear interpolation between the two nearest."""
        p50_s, p99_s = np.percentile(seconds, (50, 99))
        return cls(p50_s=float(p50_s), p99_s=float(p99_s))


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Between the beginnings of two steps in a row, of a generator that never rests."""

    usual_p50_s: float
    usual_max_s: float
    """While no version was on its way."""
    swap_max_s: float
    """While one was pulled, loaded or proved."""

    @property
    def paused_s(self) -> float:
        """By how much the longest gap around a swap exceeds the longest away from one."""
        return max(0.0, self.swap_max_s - self.usual_max_s)

    @classmethod
    def of(
        cls, steps: Mapping[str, Sequence[float]], swaps: Mapping[str, Sequence[Span]]
    ) -> "Gaps":
        """Over all generators, each with the times of its steps and the spans of its swaps."""
        usual: list[np.ndarray] = []
        swapping: list[np.ndarray] = []
        for generator, at in steps.items():
            steps_S = np.asarray(at)
            starts_G, ends_G = steps_S[:-1], steps_S[1:]
            is_swap_G = np.zeros(len(starts_G), dtype=bool)
            for begin, end in swaps[generator]:
                is_swap_G |= (starts_G < end) & (ends_G > begin)
            gaps_G = ends_G - starts_G
            usual.append(gaps_G[~is_swap_G])
            swapping.append(gaps_G[is_swap_G])
        usual_G, swapping_G = np.concatenate(usual), np.concatenate(swapping)
        return cls(
            usual_p50_s=float(np.median(usual_G)),
            usual_max_s=float(usual_G.max()),
            swap_max_s=float(swapping_G.max()),
        )


def figures(
    *,
    case: str,
    engine: str,
    generators: int,
    adapter_bytes: int,
    delays: Mapping[str, Sequence[float]],
    upload_s: Sequence[float],
    read_bytes: Sequence[float],
    gaps: Gaps,
) -> dict[str, object]:
    """What `sync.json` says of a case. `delays` are seconds since the manifest was sent, by stage,
    one for each version on each generator; `read_bytes` is what left the store for each version."""
    report: dict[str, object] = {
        "case": case,
        "engine": engine,
        "generators": generators,
        "adapter_bytes": adapter_bytes,
        "versions": len(read_bytes),
    }
    for stage in STAGES:
        of_stage = Percentiles.of(delays[stage])
        name = "first_sample" if stage == "sampled" else stage
        report[f"published_to_{name}_p50_s"] = of_stage.p50_s
        report[f"published_to_{name}_p99_s"] = of_stage.p99_s
    return {
        **report,
        "upload_p50_s": float(np.median(upload_s)),
        "s3_read_bytes_per_version": float(np.mean(read_bytes)),
        "s3_reads_per_version": float(np.mean(read_bytes)) / adapter_bytes,
        "paused_s": gaps.paused_s,
        "step_gap_usual_p50_s": gaps.usual_p50_s,
        "step_gap_usual_max_s": gaps.usual_max_s,
        "step_gap_swap_max_s": gaps.swap_max_s,
    }


def table_of(cases: Sequence[Mapping[str, object]]) -> Table:
    """The figures for a person."""
    table = figure_table(
        "From the manifest to the generators: p50 / p99, ms",
        ("visible", "loaded", "served", "first sample", "MB read", "paused", "gaps"),
    )
    for one in cases:
        read_mb = float(str(one["s3_read_bytes_per_version"])) / MEGABYTE
        table.add_row(
            str(one["case"]),
            *(
                f"{_ms(one, f'published_to_{stage}_p50_s')} / "
                f"{_ms(one, f'published_to_{stage}_p99_s')}"
                for stage in ("visible", "loaded", "served", "first_sample")
            ),
            f"{read_mb:.2f} ({float(str(one['s3_reads_per_version'])):.2f}×)",
            _ms(one, "paused_s"),
            f"{_ms(one, 'step_gap_swap_max_s')} / {_ms(one, 'step_gap_usual_max_s')}",
        )
    return table


def _ms(one: Mapping[str, object], name: str) -> str:
    return f"{float(str(one[name])) / MILLISECOND:.0f}"
