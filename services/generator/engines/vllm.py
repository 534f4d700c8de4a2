"""The engine for GPUs: a vLLM server that is started here or elsewhere, over HTTP.

Every request names its adapter, and a name never means anything else (vLLM keys its prefix cache
by it), so versions live side by side and nothing is ever paused or reset. vLLM loads whatever it is
given, so an adapter is checked here first. It reads the folder of an adapter that had made room for
others again, and dies where that is gone: a folder stays until the adapter is unloaded.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from transformers import PreTrainedTokenizerBase

from offbeat.contracts.run_spec import ModelSection
from offbeat.errors import (
    ConflictError,
    IntegrityError,
    NotFoundError,
    PermanentJobError,
    UnavailableError,
)
from services.generator.engines.adapter import read_adapter
from services.generator.engines.base import (
    Completion,
    SampleRequest,
    Sampling,
    never_cancelled,
    not_heard,
)
from services.generator.engines.vllm_checks import check_adapters, check_model, check_server
from services.generator.engines.vllm_command import AdapterLimits
from services.generator.engines.vllm_completions import (
    NOT_URGENT,
    URGENT,
    complete,
    completion_bodies,
)
from services.generator.engines.vllm_http import ServerAddress, VllmClient
from services.generator.engines.vllm_model import ModelOutline
from services.generator.engines.vllm_server import VllmServer, wait_until_healthy

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """What an engine is told of its server and its work."""

    address: ServerAddress
    limits: AdapterLimits
    sequences_max: int
    """Samples that vLLM is asked for at once, by each job."""
    start_timeout_s: float
    request_timeout_s: float


class VllmEngine:
    """See `Engine`. The same seed gives the same sample as far as vLLM's arithmetic does not depend
    on the rest of the batch."""

    name = "vllm"

    def __init__(
        self,
        options: VllmOptions,
        *,
        model: ModelSection,
        model_folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        adapters_folder: Path,
        server: VllmServer | None = None,
    ) -> None:
        self._options = options
        self._model = model
        self._model_folder = model_folder
        self._outline = ModelOutline.read(model_folder, tokenizer)
        self._adapters_folder = adapters_folder.resolve()
        self._server = server
        self._client = VllmClient(options.address)
        self._changed = threading.Condition()
        self._names: set[str] = set()
        self._busy: set[str] = set()
        """Names that a thread is loading or unloading: no other thread may do either."""
        self._max_model_len: int | None = None
        self._checked = False
        self._checking = threading.Lock()
        self._closed = threading.Event()

    def load(self, policy: str, folder: Path) -> None:
        """Check the adapter, have the server read it, and see that it is listed."""
        self._check_adapter(folder)
        with self._exclusive(policy):
            if policy in self.loaded():
                raise ConflictError(f"{policy} is loaded already: a name has one content")
            if policy in self._listed():
                self._client.unload(policy)
            self._client.load(policy, folder.resolve())
            if policy not in self._listed():
                raise UnavailableError(f"vLLM took {policy} but does not list it")
            with self._changed:
                self._names.add(policy)

    def unload(self, policy: str) -> None:
        """See `Engine`; `UnavailableError` unless the server acknowledges it, or is gone."""
        with self._exclusive(policy):
            with self._changed:
                self._names.discard(policy)
            self._client.unload(policy)

    def loaded(self, *, check: Callable[[], None] = never_cancelled) -> frozenset[str]:
        """The names that requests may use.

        Waits for a server that is starting. One that was restarted has lost its adapters, and may
        have other settings: it is checked again.
        """
        self._wait_until_ready(check)
        with self._changed:
            names = frozenset(self._names)
        listed = self._listed()
        with self._changed:
            lost = (names - listed) & self._names
            self._names -= lost
        if lost:
            log.warning("vLLM has lost adapters: it was restarted.", lost=sorted(lost))
            self._checked = False
            self._wait_until_ready(check)
        return names & listed

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
        """See `Engine.generate`; at most `sequences_max` samples are under way at once."""
        with self._changed:
            if policy not in self._names:
                raise NotFoundError(f"{policy} is not loaded")
        self._check_lengths(requests, sampling)
        completions = complete(
            self._options.address,
            completion_bodies(
                requests,
                policy,
                sampling,
                stop_ids=sorted(self._outline.eos_ids),
                priority=URGENT if urgent else NOT_URGENT,
            ),
            at_once=self._options.sequences_max,
            timeout_s=self._options.request_timeout_s,
            check=lambda: self._check_wanted(check),
            on_tokens=on_tokens,
        )
        remaining = iter(completions)
        return [[next(remaining) for _ in request.seeds] for request in requests]

    def close(self) -> None:
        """End the work, and the server where it was started here."""
        self._closed.set()
        if self._server is not None:
            self._server.close()
        self._client.close()

    def _check_adapter(self, folder: Path) -> None:
        adapter = read_adapter(folder, self._outline.layers)
        a_RI, _ = next(iter(adapter.factors.values()))
        rank, rank_max = a_RI.shape[0], self._options.limits.max_lora_rank
        if rank > rank_max:
            raise IntegrityError(
                f"the adapter has rank {rank}, vLLM takes {rank_max}: raise "
                "OFFBEAT_VLLM_MAX_LORA_RANK (and --max-lora-rank)"
            )

    def _check_lengths(self, requests: Sequence[SampleRequest], sampling: Sampling) -> None:
        """vLLM shortens completions that do not fit, without a word."""
        longest = max((len(request.prompt_ids) for request in requests), default=0)
        needed = longest + sampling.max_new_tokens
        if self._max_model_len is not None and needed > self._max_model_len:
            raise PermanentJobError(
                f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones do not fit "
                f"into vLLM's --max-model-len {self._max_model_len}"
            )

    def _check_wanted(self, check: Callable[[], None]) -> None:
        if self._closed.is_set():
            raise UnavailableError("the engine was closed: try again")
        check()

    def _wait_until_ready(self, check: Callable[[], None]) -> None:
        def problem() -> str | None:
            self._check_wanted(check)
            return self._server.problem if self._server else None

        problem()
        wait_until_healthy(self._client.is_healthy, problem, self._options.start_timeout_s)
        with self._checking:
            if not self._checked:
                base = check_server(self._client)
                check_model(self._client.models(), self._model, self._model_folder)
                check_adapters(
                    self._client, self._outline, self._adapters_folder, self._options.limits
                )
                self._max_model_len = base.max_model_len
                self._checked = True

    def _listed(self) -> frozenset[str]:
        return frozenset(card.id for card in self._client.models() if card.parent is not None)

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: name not in self._busy)
            self._busy.add(name)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(name)
                self._changed.notify_all()
