"""What a generator asks of an engine: token ids in, token ids and log-probabilities out.

An adapter is a local PEFT folder under an immutable name, and every request names the adapter it
wants, so that several versions can be in flight at once. Nothing here is text and nothing is a
tensor: an engine may be a thread of this process or a server at the end of a wire.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_k: int = 0
    """0 draws from the whole vocabulary."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A prompt and one seed for each sample of it."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    guess: tuple[int, ...] = ()
    """The greedy completion, as far as the caller knows it. An engine may look at all of it in one
    step, and end with its own token at the first place where the guess is wrong."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample."""

    ids: tuple[int, ...]
    """With the token that ended it."""
    logprobs: tuple[float, ...]
    """Of the distribution that was sampled from: after temperature, top-k and top-p. Greedy
    completions carry those of the plain distribution, at temperature 1."""
    finish_reason: Literal["stop", "length"]


def never_cancelled() -> None:
    """The check of work that nobody takes away."""


def not_heard(_: Sequence[int]) -> None:
    """Takes the tokens of work whose result is soon enough."""


class Engine(Protocol):
    """One base model. Every method may be called from any thread."""

    @property
    def name(self) -> str:
        """The kind of engine, as rollouts record it."""
        ...

    def load(self, policy: str, folder: Path) -> None:
        """Make the PEFT folder usable under this name. `IntegrityError` for an adapter that is not
        whole, not finite or not of this model, before the engine itself sees it."""
        ...

    def unload(self, policy: str) -> None:
        """Forget an adapter; a name that is not loaded is fine. Requests in flight keep it."""
        ...

    def loaded(self, *, check: Callable[[], None] = never_cancelled) -> frozenset[str]:
        """The names that requests may use; waits for an engine that is starting, until `check`
        raises."""
        ...

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
        """For each request one completion a seed, in order.

        The same requests, seeds and adapter give the same completions. `urgent` work goes before
        other work; `check` is called between steps and ends the work by raising. `on_tokens` gets
        the ids of the first sample as they come, all and once; it must return at once.
        """
        ...

    def close(self) -> None:
        """Give up the model; work in flight raises `UnavailableError`."""
        ...
