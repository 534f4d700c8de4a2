"""The workloads of the generator benchmark: so many sequences of at most so many tokens.

Prompts are those of the demo's task. Where a completion ends is up to the model, so lengths are
uneven, and what counts are the tokens up to the end of each.
"""

from dataclasses import dataclass
from pathlib import Path

from offbeat.data.prompts import build_prompts
from offbeat.data.rows import checked_row
from offbeat.data.sources import SOURCES
from offbeat.models import load_tokenizer
from offbeat.specs import load_spec
from scripts.demo import EXAMPLE
from services.generator.engines.base import SampleRequest

GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class GeneratorCase:
    """One workload."""

    sequences: int
    new_tokens: int
    """The most; half of the completions of the longer workload end before half of it."""
    adapter: bool
    """Whether the policy is the base model with an adapter, or the base model."""

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.sequences} x {self.new_tokens}{' LoRA' if self.adapter else ''}"


CASES = tuple(
    GeneratorCase(sequences=sequences, new_tokens=new_tokens, adapter=adapter)
    for new_tokens in (24, 256)
    for sequences in (1, 8, 64)
    for adapter in (False, True)
)
QUICK_CASES = tuple(case for case in CASES if case.new_tokens == 24 and case.sequences <= 8)


def prompts_of_demo(model: Path) -> list[tuple[int, ...]]:
    """The first prompts of the demo's run, tokenised."""
    data = load_spec(EXAMPLE).data
    rows = SOURCES[data.source](data, None, checked_row)
    prompts, _ = build_prompts(data, rows, load_tokenizer(model, None), None)
    return [prompt.prompt_ids for prompt in prompts]


def requests_of(case: GeneratorCase, prompts: list[tuple[int, ...]]) -> list[SampleRequest]:
    """Groups of at most `GROUP_SIZE` samples, as a run asks for them."""
    size = min(GROUP_SIZE, case.sequences)
    return [
        SampleRequest(
            prompt_ids=prompts[group], seeds=tuple(range(group * size, (group + 1) * size))
        )
        for group in range(case.sequences // size)
    ]
