"""Losses, corrections and divergence against the formulas written out token by token.

The other implementation goes through samples in plain loops, one scalar at a time, and shares no
code. Values and gradients agree in float64 on random ragged samples whose behaviour, proximal,
current and reference policies all differ, in one micro-batch and in several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from offbeat.algorithms.corrections import CORRECTIONS, is_near_policy
from offbeat.algorithms.kl import k3
from offbeat.algorithms.losses import LOSSES, Clip, LossTokens

LOW, HIGH, CAP, THRESHOLD, BETA = 0.2, 0.28, 2.0, 0.05, 0.03
NUM_SAMPLES, LENGTH_MAX = 9, 12
SPREAD = 0.4
"""Of the log-ratios: wide enough to take both sides of every bound."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    advantage: float
    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    reference: Tensor


def random_samples(seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def near(logprobs: Tensor) -> Tensor:
        noise = torch.randn(len(logprobs), dtype=torch.float64, generator=generator)
        return (logprobs + SPREAD * noise).clamp(max=-1e-3)

    samples: list[Sample] = []
    for place in range(NUM_SAMPLES):
        length = int(torch.randint(1, LENGTH_MAX + 1, (), generator=generator))
        behaviour = -3 * torch.rand(length, dtype=torch.float64, generator=generator)
        proximal = near(behaviour)
        samples.append(
            Sample(
                advantage=(-1.0, 0.0, 0.7)[place % 3],
                current=near(proximal).requires_grad_(),
                proximal=proximal,
                behaviour=behaviour,
                reference=near(behaviour),
            )
        )
    return samples


def loss_by_plain_loops(samples: Sequence[Sample], name: str, correction: str) -> Tensor:
    num_tokens = sum(len(sample.current) for sample in samples)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        length = len(sample.current)
        share = 1 / num_tokens
        if name in ("grpo", "gspo", "sapo"):
            share = 1 / (len(samples) * length)
        elif name == "dr_grpo":
            share = 1 / (len(samples) * LENGTH_MAX)
        for place in range(length):
            weight = plain_weight(sample, place, correction)
            difference = sample.reference[place] - sample.current[place]
            divergence = math.e**difference - 1 - difference
            total = total + share * weight * plain_term(sample, place, name, correction)
            total = total + share * BETA * divergence
    return total


def plain_weight(sample: Sample, place: int, correction: str) -> float:
    current, proximal, behaviour = (
        policy.tolist() for policy in (sample.current.detach(), sample.proximal, sample.behaviour)
    )
    distance = sum(b - c for b, c in zip(behaviour, current, strict=True)) / len(current)
    if sample.advantage < 0 and distance > THRESHOLD:
        return 0.0
    gaps = [p - b for p, b in zip(proximal, behaviour, strict=True)]
    match correction:
        case "tis":
            return min(math.exp(gaps[place]), CAP)
        case "tis_sequence":
            return min(math.exp(sum(gaps)), CAP)
        case "mis":
            ratio = math.exp(gaps[place])
            return ratio if 1 / CAP <= ratio <= CAP else 0.0
        case _:
            return 1.0


def plain_term(sample: Sample, place: int, name: str, correction: str) -> Tensor:
    advantage, current = sample.advantage, sample.current[place]
    base = sample.behaviour if correction == "none" else sample.proximal
    ratio = math.e ** (current - base[place])
    if name == "gspo":
        length = len(sample.current)
        ratio = math.e ** (sum(sample.current[t] - base[t] for t in range(length)) / length)
    match name:
        case "cispo":
            return -min(ratio.item(), 1 + HIGH) * advantage * current
        case "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            return -advantage * 4 / tau / (1 + math.e ** (-tau * (ratio - 1)))
        case "dppo":
            change = (math.e**current - math.e ** base[place]).item()
            term = 1e-3 * (current - base[place]) ** 2
            if (advantage > 0 and change > 0.2) or (advantage <= 0 and change < -0.2):
                return term
            return term - advantage * ratio
        case _:
            if advantage > 0 and ratio > 1 + HIGH:
                return torch.tensor(-advantage * (1 + HIGH), dtype=torch.float64)
            if advantage < 0 and ratio < 1 - LOW:
                return torch.tensor(-advantage * (1 - LOW), dtype=torch.float64)
            return -advantage * ratio


def loss_of_micro_batch(
    samples: Sequence[Sample], numbers: Sequence[int], name: str, correction: str
) -> Tensor:
    lengths_S = torch.tensor([float(len(one.current)) for one in samples], dtype=torch.float64)
    chosen = [samples[number] for number in numbers]
    samples_N = torch.tensor(numbers).repeat_interleave(lengths_S[numbers].long())
    advantages_S = torch.tensor([one.advantage for one in samples], dtype=torch.float64)
    logprobs_N = torch.cat([one.current for one in chosen])
    behaviour_N = torch.cat([one.behaviour for one in chosen])
    corrected = CORRECTIONS[correction](
        torch.cat([one.proximal for one in chosen]), behaviour_N, samples_N, CAP
    )
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=corrected.old_logprobs_N,
        advantages_N=advantages_S[samples_N],
        samples_N=samples_N,
    )
    loss = LOSSES[name]
    weights_N = corrected.weights_N * is_near_policy(
        logprobs_N.detach(), behaviour_N, tokens.advantages_N, samples_N, THRESHOLD
    )
    terms_N = weights_N * loss.term(loss.ratio(tokens), tokens, Clip(low=LOW, high=HIGH))
    terms_N = terms_N + BETA * k3(logprobs_N, torch.cat([one.reference for one in chosen]))
    return (terms_N * loss.reduction(lengths_S, LENGTH_MAX)[samples_N]).sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_plain_loops(
    name: str, correction: str, seed: int
) -> None:
    samples = random_samples(seed)
    current = [sample.current for sample in samples]
    expected = loss_by_plain_loops(samples, name, correction)
    expected_gradients = torch.autograd.grad(expected, current)
    for micro_batches in ([range(NUM_SAMPLES)], [[8, 0], [3, 1, 2], [7, 6, 5, 4]]):
        parts = [loss_of_micro_batch(samples, part, name, correction) for part in micro_batches]
        value = torch.stack(parts).sum()
        assert value.item() == pytest.approx(expected.item(), abs=1e-10)
        gradients = torch.autograd.grad(value, current)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-10)
