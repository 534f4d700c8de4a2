"""The ranks of one trainer: processes that compute together, one for each GPU.

    rank 0      is the trainer: it takes the jobs, keeps the state, talks to the other services
    all ranks   hold a part of the base model and all of the adapter's copies, and compute
                micro-batches of their own

Rank 0 decides. What needs every rank is a collective method: when rank 0 calls it, the others are
told its name and arguments, and all run it at the same time. What they hold besides can be made
again at any moment, so a group whose rank died is started anew (torchrun does that), and has lost
no more than a trainer that is alone.

An error that every rank meets, as a model that cannot be trained, leaves the ranks at the same
place. After any other one they no longer are, and would wait for each other: the process ends.
"""

import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from offbeat.errors import PermanentJobError

log = structlog.get_logger(__name__)

IDLE_MAX = timedelta(days=365)
"""How long the others wait for the next call: a trainer may have no job for long."""

P = ParamSpec("P")
T = TypeVar("T")


class Call(NamedTuple):
    """What all ranks run next."""

    owner: str
    """The class whose method it is."""
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The process group, as one rank sees it."""

    rank: int
    size: int
    grid: DeviceMesh
    """All ranks: those of a row hold one copy of the model together, each a part."""
    calls: dist.ProcessGroup
    """Waits for the next call as long as it takes. Within a call the default group is used, whose
    patience is limited."""
    saves: dist.ProcessGroup
    """For what is saved beside a call; one rank may take long to upload its part."""


class Ranks:
    """All ranks of the trainer. Without a group there is this one alone, and nothing is sent."""

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self._is_inside = False
        """Whether a collective method runs: what it calls is collective by itself."""

    @classmethod
    def join(cls, device: torch.device, shard_ranks: int | None, timeout_s: float) -> Self:
        """The group that torchrun's environment names; alone where there is none. `shard_ranks`
        hold one copy of the base model together: by default those of a machine."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        timeout = timedelta(seconds=timeout_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        shards = shard_ranks or int(os.environ["LOCAL_WORLD_SIZE"])
        if size % shards:
            raise ValueError(
                f"{size} ranks are no multiple of {shards} that hold a model together: set "
                "OFFBEAT_SHARD_RANKS to a divisor"
            )
        # torchrun keeps its store when it starts the ranks again: the addresses there are old.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            _backend(device),
            store=dist.PrefixStore(f"life-{life}", store),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        grid = init_device_mesh(
            device.type, (size // shards, shards), mesh_dim_names=("replicate", "shard")
        )
        calls = dist.new_group(backend="gloo", timeout=IDLE_MAX)
        saves = dist.new_group(backend="gloo", timeout=IDLE_MAX)
        assert isinstance(calls, dist.ProcessGroup), "all ranks are members"
        assert isinstance(saves, dist.ProcessGroup), "all ranks are members"
        return cls(Group(rank=rank, size=size, grid=grid, calls=calls, saves=saves))

    @property
    def rank(self) -> int:
        """This one's number."""
        return self._group.rank if self._group else 0

    @property
    def size(self) -> int:
        """How many there are."""
        return self._group.size if self._group else 1

    @property
    def num_shards(self) -> int:
        """How many hold one copy of the base model together."""
        return self._group.grid["shard"].size() if self._group else 1

    @property
    def saves(self) -> dist.ProcessGroup | None:
        """The ranks, for what they save together beside a call; None for this one alone."""
        return self._group.saves if self._group else None

    def divides(self, *, offload: bool) -> bool:
        """Whether a rank holds a frozen base in parts. One that has all of it to itself would only
        pay for putting it together, unless that is how a part at a time comes to its GPU."""
        return offload or self.num_shards > 1

    def shard_mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks that hold one copy of a frozen base together."""
        return self._group.grid["shard"] if self._group else _mesh_of_one(device)

    def training_mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks, for a model whose weights are all trained: what each of several copies has of
        a gradient is added up."""
        if self._group is None or self._group.grid.size(0) == 1:
            return self.shard_mesh(device)
        return self._group.grid

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        """Have the other ranks run the call while this one does."""
        if self._group is None or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            self._send(self._group, call)
            yield
        except PermanentJobError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the others wait
            self._give_up(call)
        finally:
            self._is_inside = False

    def follow(self, owners: Mapping[str, Callable[[], object]]) -> None:
        """Run what rank 0 calls, on the owner that it names, until rank 0 leaves."""
        assert self._group is not None
        self._is_inside = True
        while (call := self._receive(self._group)) is not None:
            try:
                getattr(owners[call.owner](), call.method)(*call.arguments)
            except PermanentJobError as error:
                log.info("The job cannot be done.", reason=error.detail)
            except Exception:  # noqa: BLE001 - whatever it is, the others wait
                self._give_up(call)

    def leave(self) -> None:
        """Let the other ranks end. Called by rank 0 after its last job."""
        if self._group is not None:
            try:
                self._send(self._group, None)
            except RuntimeError as error:
                log.info("The other ranks have left already.", error=str(error).splitlines()[0])

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks what rank 0 has."""
        if self._group is not None:
            with _as_one(list(tensors)) as flat:
                dist.broadcast(flat, 0)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Leave the sum over all ranks with rank 0."""
        if self._group is not None:
            with _as_one(list(tensors)) as flat:
                dist.reduce(flat, 0)

    def gathered(self, own: T) -> list[T]:
        """What each rank has, in their order, at rank 0; nothing at the others."""
        if self._group is None:
            return [own]
        everyone = [b""] * self.size if self.rank == 0 else None
        dist.gather_object(_encoded(own), everyone)
        return [cast(T, _decoded(one)) for one in everyone or ()]

    def _send(self, group: Group, call: Call | None) -> None:
        dist.broadcast_object_list([_encoded(call)], 0, group=group.calls)

    def _receive(self, group: Group) -> Call | None:
        received = [b""]
        try:
            dist.broadcast_object_list(received, 0, group=group.calls)
        except RuntimeError as error:
            log.warning("Rank 0 is gone: this rank ends too.", error=str(error).splitlines()[0])
            os._exit(os.EX_UNAVAILABLE)
        return cast(Call | None, _decoded(received[0]))

    def _give_up(self, call: Call) -> NoReturn:
        log.exception("A rank failed: its group ends.", rank=self.rank, call=call.method)
        # No clean-up: that would wait for ranks that wait for this one.
        os._exit(os.EX_SOFTWARE)


def _mesh_of_one(device: torch.device) -> DeviceMesh:
    """FSDP2 and checkpoints want a group, also of a trainer that is alone."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))


def _backend(device: torch.device) -> str:
    """Tensors that are offloaded are exchanged too, and NCCL knows those of GPUs only."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def own_device(device: torch.device) -> torch.device:
    """The GPU of the machine that is this rank's."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


class HasRanks(Protocol):
    """An object whose collective methods all ranks run."""

    @property
    def ranks(self) -> Ranks:
        """All ranks that have the object."""
        ...


H = TypeVar("H", bound=HasRanks)


def collective(
    method: Callable[Concatenate[H, P], T],
) -> Callable[Concatenate[H, P], T]:
    """A method that all ranks run at the same time when rank 0 calls it."""

    @functools.wraps(method)
    def call_all(owner: H, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "a call is sent by position"
        call = Call(type(owner).__name__, method.__name__, arguments)
        with owner.ranks.together(call):
            return method(owner, *arguments, **named)

    return call_all


def _encoded(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _decoded(body: bytes) -> object:
    # Tensors were on another rank's device. What comes from the ranks is as trusted as the code.
    return torch.load(io.BytesIO(body), map_location="cpu", weights_only=False)


@contextmanager
def _as_one(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The tensors as one, so that a slow link is waited for once; they take its values."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    yield flat
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
