"""The state of a model that is trained in full, as torch's distributed checkpoint sees the store.

    trainer_state-<rank>-<number>.safetensors     what a rank holds, in parts of about a gibibyte
    trainer_state.index.json                      where the part of each tensor lies

torch plans who writes what, and who reads what on another number of ranks. What is here only moves
bytes: each rank writes its own files and reads those that hold rows of its own, whole, so that
each is checked against the manifest. Nothing is pickled into the store.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from pydantic import NonNegativeInt
from safetensors.torch import load, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from offbeat.contracts.base import Contract
from offbeat.contracts.weights import STATE_INDEX, STATE_PREFIX, FileName, Manifest, VersionFile
from offbeat.objects import ObjectStore
from services.trainer import checkpoint

PART_BYTES = 2**30
"""A file takes twice its size of memory while it is written or read."""

Lengths = tuple[NonNegativeInt, ...]


class Chunk(Contract):
    """A part of a tensor, which lies in a file under the tensor's name."""

    file: FileName
    offsets: Lengths
    sizes: Lengths


class StoredTensor(Contract):
    """All parts of a tensor, float32."""

    shape: Lengths
    chunks: tuple[Chunk, ...]


class StateIndex(Contract):
    """Where the tensors of a state lie."""

    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a rank tells rank 0 of a part that it has written."""

    file: VersionFile
    sizes: Lengths


class StateWriter(StorageWriter):
    """Writes below a prefix. At rank 0, `files` and `index` are there once all ranks are done."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.files: tuple[VersionFile, ...] = ()
        self.index = StateIndex(tensors={})
        self._store, self._prefix, self._rank = store, prefix, 0

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Nothing is named by a path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Learn which rank this is."""
        self._rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch has planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As torch has planned it."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts, one file after the other."""
        results: list[WriteResult] = []
        for number, items in enumerate(_parts(plan.items)):
            name = f"{STATE_PREFIX}-{self._rank:05d}-{number:05d}.safetensors"
            body = save({item.index.fqn: _resolved(item, planner) for item in items})
            file = checkpoint.put(self._store, self._prefix, name, body)
            for item in items:
                assert item.tensor_data is not None, "a state has nothing but tensors"
                sizes = tuple(item.tensor_data.chunk.sizes)
                results.append(
                    WriteResult(
                        index=item.index,
                        size_in_bytes=_num_bytes(item),
                        storage_data=Written(file=file, sizes=sizes),
                    )
                )
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put together what the ranks have written."""
        chunks: dict[str, list[Chunk]] = {}
        files: dict[str, VersionFile] = {}
        for result in chain.from_iterable(results):
            written: Written = result.storage_data
            files[written.file.name] = written.file
            assert result.index.offset is not None, "a part of a tensor begins somewhere"
            chunk = Chunk(
                file=written.file.name, offsets=tuple(result.index.offset), sizes=written.sizes
            )
            chunks.setdefault(result.index.fqn, []).append(chunk)
        self.files = tuple(files.values())
        self.index = StateIndex(
            tensors={
                name: StoredTensor(shape=_shape(metadata, name), chunks=tuple(parts))
                for name, parts in sorted(chunks.items())
            }
        )


class StateReader(StorageReader):
    """Reads the state of a version. Raises `IntegrityError` for what its manifest does not say."""

    def __init__(self, store: ObjectStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        body = checkpoint.download(store, manifest, (STATE_INDEX,))[STATE_INDEX]
        self._tensors = StateIndex.model_validate_json(body).tensors

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Nothing is named by a path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader reads one version."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        """The index, in torch's words."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size(tensor.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
                )
                for name, tensor in self._tensors.items()
            }
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing to do: the index is there."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As torch has planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As torch has planned it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the files in which this rank has parts, one after the other."""
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._file_of(item.storage_index), []).append(item)
        for name, items in sorted(wanted.items()):
            tensors = load(checkpoint.download(self._store, self._manifest, (name,))[name])
            for item in items:
                _copy(tensors[item.storage_index.fqn], item, planner)
        return _done(None)

    def _file_of(self, place: MetadataIndex) -> str:
        offsets = tuple(place.offset or ())
        return next(
            chunk.file for chunk in self._tensors[place.fqn].chunks if chunk.offsets == offsets
        )


def _resolved(item: WriteItem, planner: SavePlanner) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), "a state has nothing but tensors"
    return tensor.detach().contiguous()


def _copy(stored: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    rows = tuple(
        slice(start, start + length)
        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    target = planner.resolve_tensor(item).detach()
    target.copy_(stored[rows])
    planner.commit_tensor(item, target)


def _parts(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """The items in their order, in parts that are a file each."""
    part, size_bytes = list[WriteItem](), 0
    for item in items:
        if part and size_bytes + _num_bytes(item) > PART_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(item)
        size_bytes += _num_bytes(item)
    if part:
        yield part


def _num_bytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0


def _shape(metadata: Metadata, name: str) -> tuple[int, ...]:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata), "a state has nothing but tensors"
    return tuple(stored.size)


def _done(value: Any) -> Future[Any]:  # noqa: ANN401
    future = Future[Any]()
    future.set_result(value)
    return future
