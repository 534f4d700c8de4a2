"""Decodes a batch of samples, one token of every sample a step.

Each prompt is computed once and its cache copied for its samples. Samples that have ended leave the
batch and the cache. Axes: N samples in the batch, P prompts, T tokens so far, S steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from services.generator.engines.adapter import Adapter
from services.generator.engines.base import Completion, SampleRequest, Sampling, not_heard
from services.generator.engines.model import LoraModel
from services.generator.engines.sampling import choose, uniforms
from services.generator.engines.step_loop import Steps

STOP_SLACK_TOKENS = 4
"""Tokens decoded before those that could hold a stop string: the first ones may be broken
characters or lose their leading space."""


class Endings:
    """Says when a sample is over."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], sampling: Sampling
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._sampling = sampling
        # A token is at least one byte of text, so the last match lies within so many tokens.
        lengths = [len(stop.encode()) for stop in sampling.stop]
        self._window_tokens = max(lengths, default=0) + STOP_SLACK_TOKENS

    def reason(self, ids: list[int]) -> Literal["stop", "length"] | None:
        """Why a sample ends with its last token; None while it goes on."""
        if ids[-1] in self._eos_ids or self._holds_stop(ids):
            return "stop"
        return "length" if len(ids) == self._sampling.max_new_tokens else None

    def _holds_stop(self, ids: list[int]) -> bool:
        if not self._sampling.stop:
            return False
        text = self._tokenizer.decode(ids[-self._window_tokens :])
        return any(stop in text for stop in self._sampling.stop)


@dataclass(kw_only=True)
class _Sample:
    prompt: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            ids=tuple(self.ids), logprobs=tuple(self.logprobs), finish_reason=self.finish_reason
        )


def decode(
    model: LoraModel,
    adapter: Adapter,
    requests: Sequence[SampleRequest],
    sampling: Sampling,
    endings: Endings,
    check: Callable[[], None],
    on_tokens: Callable[[Sequence[int]], None] = not_heard,
) -> Steps[list[Completion]]:
    """One completion for each seed of each request, in order; yields after every forward."""
    samples = [_Sample(prompt=p) for p, request in enumerate(requests) for _ in request.seeds]
    seeds = [seed for request in requests for seed in request.seeds]
    uniforms_NS = torch.stack([uniforms(seed, sampling.max_new_tokens) for seed in seeds])
    uniforms_NS = uniforms_NS.to(model.device)

    check()
    cache = model.new_cache()
    ids_PT, mask_PT = left_padded([request.prompt_ids for request in requests], model.device)
    positions_PT = (mask_PT.cumsum(-1) - 1).clamp_(min=0)
    logits_PV = model.next_logits(adapter, ids_PT, mask_PT, positions_PT, cache)[:, -1]
    prompt_N = torch.tensor([sample.prompt for sample in samples], device=model.device)
    cache.batch_select_indices(prompt_N)
    logits_NV, mask_NT = logits_PV[prompt_N], mask_PT[prompt_N]
    position_N1 = positions_PT[prompt_N, -1:]

    batch = samples
    for step in range(sampling.max_new_tokens):
        ids_N, logprobs_N = choose(logits_NV, uniforms_NS[:, step], sampling)
        for sample, token, logprob in zip(batch, ids_N.tolist(), logprobs_N.tolist(), strict=True):
            sample.ids.append(token)
            sample.logprobs.append(logprob)
            sample.finish_reason = endings.reason(sample.ids)
        if batch[0] is samples[0]:
            on_tokens(samples[0].ids[-1:])
        alive = [n for n, sample in enumerate(batch) if sample.finish_reason is None]
        if not alive:
            break
        if len(alive) < len(batch):
            kept_N = torch.tensor(alive, device=model.device)
            cache.batch_select_indices(kept_N)
            batch = [batch[n] for n in alive]
            ids_N, uniforms_NS, mask_NT = ids_N[kept_N], uniforms_NS[kept_N], mask_NT[kept_N]
            position_N1 = position_N1[kept_N]
        yield
        check()
        mask_NT = torch.cat([mask_NT, mask_NT.new_ones(len(batch), 1)], dim=1)
        position_N1 = position_N1 + 1
        logits_N1V = model.next_logits(adapter, ids_N[:, None], mask_NT, position_N1, cache)
        logits_NV = logits_N1V[:, 0]
    return [sample.completion() for sample in samples]


def verify_guess(
    model: LoraModel,
    adapter: Adapter,
    request: SampleRequest,
    sampling: Sampling,
    endings: Endings,
    check: Callable[[], None],
) -> Steps[list[Completion]]:
    """The greedy completion of a request with a guess, as far as one forward can tell it."""
    check()
    ids_1T = torch.tensor([(*request.prompt_ids, *request.guess[:-1])], device=model.device)
    logits_1GV = model.next_logits(
        adapter,
        ids_1T,
        torch.ones_like(ids_1T),
        torch.arange(ids_1T.shape[1], device=model.device)[None],
        model.new_cache(),
        num_last=len(request.guess),
    )
    ids_G, logprobs_G = choose(logits_1GV[0], torch.empty(0), sampling)
    ids, logprobs = list[int](), list[float]()
    reason: Literal["stop", "length"] | None = None
    for guessed, token, logprob in zip(
        request.guess, ids_G.tolist(), logprobs_G.tolist(), strict=True
    ):
        ids.append(token)
        logprobs.append(logprob)
        reason = endings.reason(ids)
        if reason is not None or token != guessed:
            break
    yield
    return [Completion(ids=tuple(ids), logprobs=tuple(logprobs), finish_reason=reason or "length")]


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The prompts as one table with their last tokens in line, and 1 where a token is real."""
    width = max(map(len, prompts))
    ids_PT = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=device)
    mask_PT = torch.tensor(
        [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device
    )
    return ids_PT, mask_PT
