"""The workloads of the step benchmark, and the samples that both contenders train on.

Token ids are random, since no contender's time depends on them; lengths are ragged as in real runs,
and every group has rewards that differ, so that no sample may be left out.
"""

import random
from dataclasses import dataclass
from datetime import UTC, datetime

from offbeat.contracts.rollouts import Rollout

GROUPS = 8
GROUP_SIZE = 8
TOKEN_IDS = range(1000, 40_000)
"""Plain words of the model's vocabulary: no special tokens."""
LOGPROB = -2.0
RAGGED = (0.85, 1.15)
"""Prompt lengths by their mean."""
SHORTEST = 0.5
"""The shortest completions by the longest; half of them reach the limit, as while learning."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload: 64 samples of these lengths."""

    prompt_tokens: int
    """The mean."""
    new_tokens: int
    """The most."""
    trl_batch: int
    """`per_device_train_batch_size`: with about as many padded tokens at once as Offbeat forwards,
    TRL is faster than with all samples at once and takes far less memory."""
    repeats: int

    @property
    def name(self) -> str:
        """As reports and files call it."""
        return f"prompt-{self.prompt_tokens}-new-{self.new_tokens}"


CASES = (
    Case(prompt_tokens=46, new_tokens=24, trl_batch=8, repeats=5),
    Case(prompt_tokens=46, new_tokens=256, trl_batch=4, repeats=3),
    Case(prompt_tokens=512, new_tokens=24, trl_batch=2, repeats=1),
    Case(prompt_tokens=512, new_tokens=256, trl_batch=2, repeats=1),
)


def samples_of(case: Case, seed: int) -> list[Rollout]:
    """One step's samples, group by group."""
    draw = random.Random(f"{case.name} {seed}")
    samples: list[Rollout] = []
    for group in range(GROUPS):
        prompt_ids = _ids(draw, round(case.prompt_tokens * draw.uniform(*RAGGED)))
        samples += [_sample(case, draw, prompt_ids, group, number) for number in range(GROUP_SIZE)]
    return samples


def _sample(
    case: Case, draw: random.Random, prompt_ids: tuple[int, ...], group: int, number: int
) -> Rollout:
    is_whole = number % 2 == 0
    longest = case.new_tokens
    num_tokens = longest if is_whole else draw.randint(round(longest * SHORTEST), longest)
    reward = float(number % 4 == 0)
    return Rollout(
        run_id="bench",
        job_id="bench",
        group_id=f"g{group}",
        prompt_id=f"train-{group}",
        sample=number,
        policy_version=0,
        adapter_sha256="0" * 64,
        prompt_ids=prompt_ids,
        completion_ids=_ids(draw, num_tokens),
        logprobs=(LOGPROB,) * num_tokens,
        finish_reason="length" if is_whole else "stop",
        prompt="",
        completion="",
        reward=reward,
        rewards={"bench": reward},
        generator_id="bench",
        engine="bench",
        sampled_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def _ids(draw: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(draw.choice(TOKEN_IDS) for _ in range(num_tokens))
