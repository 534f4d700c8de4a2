"""The engine for a CPU or a single GPU: transformers in a thread of this process."""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from offbeat.errors import ConflictError, NotFoundError, UnavailableError
from services.generator.engines.adapter import Adapter
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)
from services.generator.engines.decode import Endings, decode, verify_guess
from services.generator.engines.model import LoraModel
from services.generator.engines.step_loop import StepLoop


class TransformersEngine:
    """See `Engine`. At most `sequences_max` samples are decoded at once; more take turns."""

    name = "transformers"

    def __init__(
        self, model: LoraModel, tokenizer: PreTrainedTokenizerBase, sequences_max: int
    ) -> None:
        self._model: LoraModel | None = model
        self._tokenizer = tokenizer
        eos_id = tokenizer.eos_token_id
        self._eos_ids = model.eos_ids | ({eos_id} if isinstance(eos_id, int) else frozenset())
        self._sequences_max = sequences_max
        self._loop = StepLoop("engine")
        self._adapters: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    def load(self, policy: str, folder: Path) -> None:
        """Read the adapter in the caller's thread: a batch under way does not notice."""
        adapter = self._open_model().read_adapter(folder)
        with self._lock:
            if policy in self._adapters:
                raise ConflictError(f"{policy} is loaded already: a name has one content")
            self._adapters[policy] = adapter

    def unload(self, policy: str) -> None:
        """Forget the adapter; its memory is free when the last batch that uses it is done."""
        with self._lock:
            self._adapters.pop(policy, None)

    def loaded(self, *, check: Callable[[], None] = never_cancelled) -> frozenset[str]:
        """The names of the adapters held; there is nothing to wait for."""
        with self._lock:
            return frozenset(self._adapters)

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
        """Decode the samples in batches; see `Engine.generate`."""
        model = self._open_model()
        with self._lock:
            adapter = self._adapters.get(policy)
        if adapter is None:
            raise NotFoundError(f"{policy} is not loaded")
        endings = Endings(self._tokenizer, self._eos_ids, sampling)
        if sampling.temperature == 0 and len(requests) == 1 and requests[0].guess:
            steps = verify_guess(model, adapter, requests[0], sampling, endings, check)
            return [self._loop.run(steps, urgent=urgent)]
        completions: list[Completion] = []
        for batch in batches(requests, self._sequences_max):
            steps = decode(model, adapter, batch, sampling, endings, check, on_tokens)
            completions += self._loop.run(steps, urgent=urgent)
            on_tokens = not_heard
        remaining = iter(completions)
        return [[next(remaining) for _ in request.seeds] for request in requests]

    def close(self) -> None:
        """End the thread of the model and free its memory, which the next one may need."""
        self._loop.close()
        self._model = None
        with self._lock:
            self._adapters.clear()
        gc.collect()  # a model and its hooks refer to one another

    def _open_model(self) -> LoraModel:
        if self._model is None:
            raise UnavailableError("the engine was closed: try again")
        return self._model


def batches(requests: Sequence[SampleRequest], size: int) -> Iterator[list[SampleRequest]]:
    """The same samples in the same order, at most `size` at a time; a request may be split."""
    batch: list[SampleRequest] = []
    room = size
    for request in requests:
        seeds = request.seeds
        while seeds:
            batch.append(SampleRequest(prompt_ids=request.prompt_ids, seeds=seeds[:room]))
            seeds, room = seeds[room:], room - len(batch[-1].seeds)
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
