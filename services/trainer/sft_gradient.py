"""Cross-entropy over the targets of a step: its exact gradient, and the same without one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.algorithms.cross_entropy import TargetScores
from offbeat.algorithms.packing import PackedTokens
from offbeat.contracts.run_spec import TrainSection
from services.trainer.gradient import Between, Gradient, accumulate
from services.trainer.metrics import Metrics
from services.trainer.model import Model


def sft_gradient(
    model: Model,
    batches: Sequence[PackedTokens],
    train: TrainSection,
    *,
    version: int,
    between: Between,
) -> tuple[Gradient, Metrics]:
    """The gradient of the mean loss over the targets of the whole step, and what there was to see.

    Raises as `accumulate` does.
    """
    num_targets = sum(len(batch.targets_N) for batch in batches)

    term = CrossEntropy(num_targets=num_targets)
    gradient, records = accumulate(model, batches, term, train, version=version, between=between)
    return gradient, _means(records)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The loss of a micro-batch of examples."""

    num_targets: int
    """In the whole step."""

    def __call__(self, model: Model, batch: PackedTokens) -> tuple[Tensor, TargetScores]:
        """See `model.Term`."""
        scores = model.target_scores(batch)
        part = scores.losses_N.sum() / self.num_targets
        return part, replace(scores, losses_N=scores.losses_N.detach())


def validation(model: Model, batches: Sequence[PackedTokens], check: Callable[[], None]) -> Metrics:
    """The mean loss over all targets under the installed weights, and what there was to see."""
    for batch in batches:
        model.check_packing(batch)
    records: list[TargetScores] = []
    term = CrossEntropy(num_targets=sum(len(batch.targets_N) for batch in batches))
    for start in range(0, len(batches), model.ranks.size):
        check()
        seen = model.forward(term, batches[start : start + model.ranks.size])
        records += [record for _, record in seen]
    loss = float(torch.cat([record.losses_N for record in records]).mean())
    means = {"loss": loss, **_means(records)}
    return {f"eval_{name}": value for name, value in means.items() if math.isfinite(value)}


def _means(records: Sequence[TargetScores]) -> Metrics:
    entropy_N = torch.cat([record.entropy_N for record in records])
    is_best_N = torch.cat([record.is_best_N for record in records])
    return {
        "entropy": float(entropy_N.mean()),
        "mean_token_accuracy": float(is_best_N.float().mean()),
    }
