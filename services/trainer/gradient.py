"""Forward and backward over one step: the exact gradient, whatever the micro-batches.

The weight of every sequence is known before the first backward, so micro-batches only add up. With
one update a step the policy that the step starts from is the one in the forward, so its detached
log-probabilities are the proximal ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from offbeat.algorithms.corrections import CORRECTIONS, Correction, is_near_policy
from offbeat.algorithms.kl import k3
from offbeat.algorithms.losses import LOSSES, Clip, LossTokens
from offbeat.algorithms.packing import (
    ROW_TOKENS_MAX,
    PackedBatch,
    PackedTokens,
    Row,
    pack,
    with_signal,
)
from offbeat.contracts.run_spec import RunSpec, TrainSection
from offbeat.errors import NotFiniteError
from services.trainer.batch import StepBatch
from services.trainer.model import Model, Term
from services.trainer.policy import Policy

CPU_TOKEN_BUDGET_MIN = 256
"""Tokens forwarded at once that fill a CPU's matrix units: more cost memory and are no faster."""
PROMPT_MULTIPLE = 8
"""Completions so many times as long as their prompt fill a row: computing the prompt again for the
next one costs little. Rows of a whole long group are a sixth faster and take twice the memory."""
GPU_TOKEN_BUDGET = 8192
"""Where no plan is made for the model: activations of a few billion parameters then stay well
below 24 GB."""
SEED_STRIDE = 1_000_003
"""Keeps the dropout of neighbouring versions apart for neighbouring seeds too."""


Between = Callable[[float], None]
"""Hears the share of a step that is done, before each micro-batch."""

B = TypeVar("B", bound=PackedTokens)
M = TypeVar("M", bound=Model)
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of the whole step, and its loss."""

    gradients: dict[str, Tensor]
    """By master; none in full fine-tuning, where every rank keeps its own part of it."""
    loss: float
    is_empty: bool
    """Whether nothing had to be forwarded."""


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """What was seen at the forwarded completion tokens, without gradient."""

    logprobs_N: Tensor
    behaviour_logprobs_N: Tensor
    ratio_N: Tensor
    """pi_theta / pi_old, of the token or of its sequence, as the loss bounds it."""
    weights_N: Tensor
    """The correction's, 0 where the token is masked."""
    entropy_N: Tensor
    advantages_N: Tensor
    samples_N: Tensor
    kl_N: Tensor
    """k3 to the base model; empty where the run has no KL term."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The records of all micro-batches as one, on the CPU."""
        return cls(
            **{
                field.name: torch.cat([getattr(part, field.name).cpu() for part in parts])
                for field in fields(cls)
            }
        )


def micro_batches(batch: StepBatch, spec: RunSpec, device: torch.device) -> list[PackedBatch]:
    """The rows to forward. Without another term a zero advantage has no gradient: left out."""
    rows = batch.rows()
    if not spec.train.beta and not LOSSES[spec.train.loss].holds_silent_tokens:
        rows = with_signal(rows)
    largest = max(map(_enough_tokens, rows), default=0)
    return pack(rows, token_budget(spec.train, largest, device))


def _enough_tokens(group: Row) -> int:
    """The whole group, or so much of it that its prompt hardly counts."""
    longest = max(len(one.ids) for one in group.completions)
    return min(group.num_tokens, PROMPT_MULTIPLE * len(group.prompt_ids) + longest)


def token_budget(
    train: TrainSection, largest: int, device: torch.device, enough: int = CPU_TOKEN_BUDGET_MIN
) -> int:
    """Tokens forwarded at once; on a CPU only as many as the largest row wants, and as are
    `enough`."""
    if train.token_budget != "auto":
        return train.token_budget
    if device.type != "cpu":
        return GPU_TOKEN_BUDGET
    return min(max(largest, enough), ROW_TOKENS_MAX)


def step_gradient(
    policy: Policy,
    batches: Sequence[PackedBatch],
    batch: StepBatch,
    spec: RunSpec,
    *,
    version: int,
    between: Between,
) -> tuple[Gradient, TokenRecord | None]:
    """Forward and backward through all micro-batches of rollouts, and what there was to see; None
    where nothing had to be forwarded. Raises as `accumulate` does."""
    weights_S = LOSSES[spec.train.loss].reduction(batch.lengths_S, spec.rollout.max_new_tokens)
    term = PolicyLoss(spec=spec, weights_S=weights_S)
    gradient, records = accumulate(
        policy, batches, term, spec.train, version=version, between=between
    )
    return gradient, TokenRecord.joined(records) if records else None


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a micro-batch of rollouts."""

    spec: RunSpec
    weights_S: Tensor
    """Of each sample of the step."""

    def __call__(self, policy: Policy, batch: PackedBatch) -> tuple[Tensor, TokenRecord]:
        """See `model.Term`."""
        losses_N, record = _forward(policy, batch, self.spec)
        weights_S = self.weights_S.to(policy.device)
        return (losses_N * weights_S[record.samples_N]).sum(), record


def accumulate(
    model: M,
    batches: Sequence[B],
    term: Term[M, B, R],
    train: TrainSection,
    *,
    version: int,
    between: Between,
) -> tuple[Gradient, list[R]]:
    """Add up loss and gradient over all micro-batches, one on each rank at a time.

    Raises `NotFiniteError` where the loss is not finite, `PermanentJobError` for a model that
    does not keep what shares a row apart.
    """
    total, records = 0.0, list[R]()
    seed = (train.seed + version * SEED_STRIDE) % 2**63
    for micro_batch in batches:
        model.check_packing(micro_batch)
    with model.training(train.gradient_checkpointing, seed):
        for start in range(0, len(batches), model.ranks.size):
            between(start / len(batches))
            stop = start + model.ranks.size
            seen = model.backward(term, batches[start:stop], stop >= len(batches))
            for part, record in seen:
                total += part
                records.append(record)
        gradients = model.gradients()
    if not math.isfinite(total):
        raise NotFiniteError(f"the loss of version {version} is {total}")
    return Gradient(gradients=gradients, loss=total, is_empty=not batches), records


def _forward(policy: Policy, batch: PackedBatch, spec: RunSpec) -> tuple[Tensor, TokenRecord]:
    train, temperature = spec.train, spec.rollout.temperature
    loss = LOSSES[train.loss]
    logprobs_N, entropy_N = policy.logprobs(batch, temperature)
    correction = _correction(logprobs_N.detach(), batch, train)
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=correction.old_logprobs_N,
        advantages_N=batch.advantages_N,
        samples_N=batch.samples_N,
    )
    clip = Clip(low=train.epsilon_low, high=train.epsilon_high)
    ratio_N = loss.ratio(tokens)
    losses_N = correction.weights_N * loss.term(ratio_N, tokens, clip)
    kl_N = logprobs_N.new_empty(0)
    if train.beta:
        with policy.reference():
            reference_N, _ = policy.logprobs(batch, temperature)
        kl_N = k3(logprobs_N, reference_N)
        losses_N = losses_N + train.beta * kl_N
    record = TokenRecord(
        logprobs_N=logprobs_N.detach(),
        behaviour_logprobs_N=batch.behaviour_logprobs_N,
        ratio_N=ratio_N.detach(),
        weights_N=correction.weights_N,
        entropy_N=entropy_N,
        advantages_N=batch.advantages_N,
        samples_N=batch.samples_N,
        kl_N=kl_N.detach(),
    )
    return losses_N, record


def _correction(logprobs_N: Tensor, batch: PackedBatch, train: TrainSection) -> Correction:
    """The correction for a step that starts from these log-probabilities, masked sequences at 0."""
    correction = CORRECTIONS[train.correction](
        logprobs_N, batch.behaviour_logprobs_N, batch.samples_N, train.correction_cap
    )
    if train.off_policy_mask is None:
        return correction
    is_near_N = is_near_policy(
        logprobs_N,
        batch.behaviour_logprobs_N,
        batch.advantages_N,
        batch.samples_N,
        train.off_policy_mask,
    )
    return replace(correction, weights_N=correction.weights_N * is_near_N)
