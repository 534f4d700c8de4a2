"""A trainer of several ranks: the test is rank 0, the others are processes of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offbeat.algorithms.example_packing import Example
from offbeat.contracts.run_spec import RunSpec
from offbeat.objects import S3ObjectStore
from offbeat.settings import ObjectStoreSettings
from scripts.parts import free_port
from services.trainer.gradient import Gradient
from services.trainer.memory import Memory
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from tests.service_process import store_environment

CPU = torch.device("cpu")
RANK_TIMEOUT_S = 60.0
"""A rank that waits for another one for longer has found a deadlock."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks there are, how many of them hold a model together, and what model that is."""

    size: int
    """0 where the trainer is of no group."""
    shard_ranks: int
    is_tied: bool
    """Whether the model's embedding is its head."""
    offload: bool = False


LAYOUTS = {
    "one-offloaded": Layout(size=1, shard_ranks=1, is_tied=True, offload=True),
    "two-copies": Layout(size=2, shard_ranks=1, is_tied=False),
    "two-tied": Layout(size=2, shard_ranks=2, is_tied=True),
    "two": Layout(size=2, shard_ranks=2, is_tied=False),
    "two-by-two": Layout(size=4, shard_ranks=2, is_tied=True),
    "four": Layout(size=4, shard_ranks=4, is_tied=False),
    "two-offloaded": Layout(size=2, shard_ranks=2, is_tied=False, offload=True),
}

MICRO_BATCHES = {
    "one": (4096, False),
    "some": (128, False),
    "many": (64, False),
    "recomputed": (64, True),
}
"""Token budget and checkpointing: one micro-batch, so that all ranks but one have none; two or
three; five, with their activations kept or computed again."""


def memory_of(
    ranks: Ranks | None = None, *, store: S3ObjectStore | None = None, offload: bool = False
) -> Memory:
    """What a rank keeps; a model's id is its folder."""
    return Memory(lambda model: Path(model.id), CPU, ranks, store=store, offload=offload)


def joined(*, shard_ranks: int, offload: bool) -> Memory:
    """What a rank of the group keeps that the environment names, as it names the store."""
    ranks = Ranks.join(CPU, shard_ranks, RANK_TIMEOUT_S)
    return memory_of(ranks, store=S3ObjectStore.connect(ObjectStoreSettings()), offload=offload)


def alone(run: RunSpec) -> Policy:
    """The run's policy as one process holds it."""
    return memory_of().policy(run)


@contextmanager
def group_of_one() -> Iterator[None]:
    """What a trainer that is alone becomes when it trains all weights ends with the test."""
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    """Have this process be of no group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def ragged_examples() -> list[Example]:
    """Of 2 to 60 tokens, all but the first a target."""
    return [
        Example(ids=tuple(range(5, 5 + length)), is_target=(False, *(True,) * (length - 1)))
        for length in (2, 60, 30, 40, 50)
    ]


def assert_same(ours: Gradient, expected: Gradient, tolerance: float, relative: float) -> None:
    """Every tensor has a gradient, and each is the other's."""
    assert ours.loss == pytest.approx(expected.loss, abs=tolerance)
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(ours.gradients[name], gradient, atol=tolerance, rtol=relative)


@contextmanager
def running_ranks(
    log: Path,
    size: int,
    *,
    shard_ranks: int,
    offload: bool = False,
    settings: ObjectStoreSettings | None = None,
) -> Iterator[Memory]:
    """Rank 0's memory, while the others follow; in the end they leave with it."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        **(store_environment(settings) if settings else {}),
    }
    mode = "offload" if offload else "stay"
    with log.open("wb") as output, pytest.MonkeyPatch.context() as patch:
        followers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.follower", str(shard_ranks), mode],
                env={**os.environ, **environment, "RANK": str(rank)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(1, size)
        ]
        for name, value in {**environment, "RANK": "0"}.items():
            patch.setenv(name, value)
        try:
            memory = joined(shard_ranks=shard_ranks, offload=offload)
            yield memory
            memory.ranks.leave()
            assert [follower.wait(timeout=60) for follower in followers] == [0] * (size - 1)
        except BaseException as error:
            error.add_note(log.read_text())
            raise
        finally:
            for follower in followers:
                follower.kill()
            leave_group()
