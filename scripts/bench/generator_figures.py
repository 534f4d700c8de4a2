"""Figures of the generator benchmark. Pure functions over measured calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from scripts.bench.generator_cases import GeneratorCase
from scripts.bench.tables import figure_table

OFFBEAT = "offbeat"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a contender."""

    tokens: int
    """Up to the end of each completion."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds


def case_figures(case: GeneratorCase, calls: Mapping[str, Sequence[Call]]) -> dict[str, object]:
    """Median tokens/s of each contender, and Offbeat's over each other's."""
    rates = {name: median(call.tokens_per_s for call in its) for name, its in calls.items()}
    return {
        "case": case.name,
        "sequences": case.sequences,
        "new_tokens_max": case.new_tokens,
        "adapter": case.adapter,
        "tokens_per_s": rates,
        "ratio": {name: rates[OFFBEAT] / rate for name, rate in rates.items() if name != OFFBEAT},
        "mean_tokens": {
            name: sum(call.tokens for call in its) / len(its) / case.sequences
            for name, its in calls.items()
        },
    }


def table_of(
    cases: Sequence[GeneratorCase], calls: Sequence[Mapping[str, Sequence[Call]]]
) -> Table:
    """The figures for a person: tokens/s, and in brackets what Offbeat's are of them."""
    others = [name for name in calls[0] if name != OFFBEAT]
    table = figure_table("Generation, tokens/s", (OFFBEAT, *others))
    for case, its in zip(cases, calls, strict=False):
        rates = {name: median(call.tokens_per_s for call in one) for name, one in its.items()}
        table.add_row(
            case.name,
            f"{rates[OFFBEAT]:.0f}",
            *(f"{rates[name]:.0f} ({rates[OFFBEAT] / rates[name]:.1f}×)" for name in others),
        )
    return table
