"""Where the time of a decoding step goes, and whether its log-probabilities are right.

Parts are timed by hooks around the engine's own modules, with the adapter and without it; what the
linear layers take longer with it is the adapter's. Axes: T completion tokens, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import nn

from scripts.bench.generator_contenders import BASE, NEW_ADAPTER, Contenders
from services.generator.engines.base import Completion, SampleRequest
from services.generator.engines.model import Float32Head

ATTENTION = "self_attn"

Seconds = dict[str, float]


class PartTimer:
    """Adds up the seconds of some modules, each under the name of its part."""

    def __init__(self) -> None:
        self.seconds: Seconds = defaultdict(float)
        self._began: list[float] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Time within the block."""
        handles = []
        for name, module in model.named_modules():
            if (part := _part(name, module)) is not None:
                handles.append(module.register_forward_pre_hook(self._start))
                handles.append(module.register_forward_hook(self._stop(part)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _start(self, *_: object) -> None:
        self._began.append(time.perf_counter())

    def _stop(self, part: str) -> Callable[..., None]:
        def stop(*_: object) -> None:
            self.seconds[part] += time.perf_counter() - self._began.pop()

        return stop


def _part(name: str, module: nn.Module) -> str | None:
    if not name:
        return "forward"
    if isinstance(module, Float32Head):
        return "head"
    if isinstance(module, nn.Linear):
        return "attention linears" if f".{ATTENTION}." in name else "other linears"
    return "attention" if name.endswith(ATTENTION) else None


def step_shares(
    contenders: Contenders, requests: Sequence[SampleRequest], new_tokens: int
) -> dict[str, float]:
    """The share of each part in the time of a whole call, prompts included.

    The adapter is a new one, so that both calls draw the same tokens.
    """
    with_s, total_s = _timed(contenders, requests, new_tokens, NEW_ADAPTER)
    without_s, _ = _timed(contenders, requests, new_tokens, BASE)
    linears = ("attention linears", "other linears")
    base_s = sum(without_s[part] for part in linears)
    lora_s = sum(with_s[part] for part in linears) - base_s
    attention_s = with_s["attention"] - with_s["attention linears"]
    parts = {
        "base linears": base_s,
        "LoRA": lora_s,
        "attention": attention_s,
        "head": with_s["head"],
        "norms, activations": with_s["forward"]
        - sum(with_s[part] for part in ("attention", "other linears", "head")),
        "sampling, bookkeeping": total_s - with_s["forward"],
    }
    return {part: seconds / total_s for part, seconds in parts.items()}


def _timed(
    contenders: Contenders, requests: Sequence[SampleRequest], new_tokens: int, policy: str
) -> tuple[Seconds, float]:
    timer = PartTimer()
    with timer.on(contenders.model.module):
        began = time.perf_counter()
        contenders.completions(requests, new_tokens, policy)
        return timer.seconds, time.perf_counter() - began


@torch.no_grad()
def logprob_difference(
    peft: PeftModel, requests: Sequence[SampleRequest], completions: Sequence[Completion]
) -> float:
    """The largest difference from a forward of each whole text, alone and without a cache."""
    prompts = [request.prompt_ids for request in requests for _ in request.seeds]
    largest = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        text = torch.tensor([[*prompt, *completion.ids]])
        logits_TV = peft(input_ids=text).logits[0, len(prompt) - 1 : -1].float()
        ids_T1 = torch.tensor(completion.ids)[:, None]
        logprobs_T = logits_TV.log_softmax(-1).gather(1, ids_T1)[:, 0]
        difference_T = (logprobs_T - torch.tensor(completion.logprobs)).abs()
        largest = max(largest, float(difference_T.max()))
    return largest
