"""One step's samples with their advantages, and the rows to forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from offbeat.algorithms.advantages import ADVANTAGES
from offbeat.algorithms.overlong import soft_overlong
from offbeat.algorithms.packing import Completion, Row
from offbeat.contracts.rollouts import Rollout
from offbeat.contracts.run_spec import RunSpec
from services.trainer.rollouts import Group


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The groups of a step; samples are numbered through all of them."""

    groups: tuple[Group, ...]
    rewards_GS: Tensor
    """float64, less the punishment of overlong samples; NaN where a sample could not be scored or a
    group is smaller than the largest."""
    advantages_GS: Tensor

    @classmethod
    def of_groups(cls, groups: Sequence[Group], spec: RunSpec) -> Self:
        """Advantages are made here, from the rewards that travelled with the samples."""
        width = max((len(group) for group in groups), default=1)
        rewards_GS = torch.full((len(groups), width), torch.nan, dtype=torch.float64)
        lengths_GS = torch.zeros(rewards_GS.shape)
        for row, group in enumerate(groups):
            for column, sample in enumerate(group):
                lengths_GS[row, column] = len(sample.completion_ids)
                if sample.reward is not None:
                    rewards_GS[row, column] = sample.reward
        rewards_GS += soft_overlong(
            lengths_GS, spec.rollout.max_new_tokens, spec.train.overlong_cache
        )
        return cls(
            groups=tuple(groups),
            rewards_GS=rewards_GS,
            advantages_GS=ADVANTAGES[spec.train.advantage](rewards_GS),
        )

    @property
    def samples(self) -> list[Rollout]:
        """All samples by their number."""
        return [sample for group in self.groups for sample in group]

    @property
    def lengths_S(self) -> Tensor:
        """Completion lengths by sample, also of those that are not forwarded."""
        return torch.tensor([len(sample.completion_ids) for sample in self.samples])

    def rows(self) -> list[Row]:
        """Each group as a row; an empty completion has nothing to forward."""
        rows: list[Row] = []
        number = 0
        for group, advantages_S in zip(self.groups, self.advantages_GS.tolist(), strict=True):
            completions = [
                Completion(
                    sample=number + place,
                    ids=sample.completion_ids,
                    behaviour_logprobs=sample.logprobs,
                    advantage=advantages_S[place],
                )
                for place, sample in enumerate(group)
                if sample.completion_ids
            ]
            number += len(group)
            rows.append(Row(prompt_ids=group[0].prompt_ids, completions=tuple(completions)))
        return [row for row in rows if row.completions]
