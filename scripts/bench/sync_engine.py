"""An engine that costs a CPU nothing: it stands for a GPU behind the `Engine` protocol.

It loads an adapter by reading its files, and what it answers to a canary follows from their bytes,
so a generator on it proves a version as it would on any other engine: a wrong or stale file has
another answer.
"""

import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.contracts.weights import ADAPTER_WEIGHTS
from offbeat.errors import NotFoundError
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)

STEP_S = 0.01
"""One token of every sample on a GPU with a small model."""
ANSWER_TOKENS = 8
"""As many as a trainer's canary has."""


def light_answer(weights: bytes) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The tokens and log-probabilities that stand for a policy with these weights."""
    draw = random.Random(zlib.crc32(weights))
    ids = tuple(draw.randrange(1000) for _ in range(ANSWER_TOKENS))
    return ids, tuple(-1.0 - draw.random() for _ in ids)


class LightEngine:
    """See `Engine`. Requests run side by side, each in its caller's thread."""

    name = "light"

    def __init__(self) -> None:
        self._answers: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {}
        self._lock = threading.Lock()

    def load(self, policy: str, folder: Path) -> None:
        """Read the files."""
        answer = light_answer((folder / ADAPTER_WEIGHTS).read_bytes())
        with self._lock:
            self._answers[policy] = answer

    def unload(self, policy: str) -> None:
        """Forget the answer."""
        with self._lock:
            self._answers.pop(policy, None)

    def loaded(self, *, check: Callable[[], None] = never_cancelled) -> frozenset[str]:
        """The names that have an answer."""
        with self._lock:
            return frozenset(self._answers)

    def generate(
        self,
        requests: Sequence[SampleRequest],
        policy: str,
        sampling: Sampling,
        *,
        urgent: bool = False,
        check: Callable[[], None] = never_cancelled,
        on_tokens: Callable[[Sequence[int]], None] = not_heard,
    ) -> list[list[Completion]]:
        """The policy's answer for each seed, after the time of its steps."""
        with self._lock:
            answer = self._answers.get(policy)
        if answer is None:
            raise NotFoundError(f"{policy} is not loaded")
        for _ in range(sampling.max_new_tokens):
            check()
            time.sleep(STEP_S)
        ids, logprobs = answer
        num_tokens = min(sampling.max_new_tokens, len(ids))
        completion = Completion(
            ids=ids[:num_tokens], logprobs=logprobs[:num_tokens], finish_reason="length"
        )
        return [[completion for _ in request.seeds] for request in requests]

    def close(self) -> None:
        """Nothing is held."""
