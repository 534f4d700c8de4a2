"""A base model's `.safetensors` files, read by rows: from a folder, or from where they lie in S3.

    8 bytes of length | that many bytes of JSON: name -> {dtype, shape, data_offsets} | tensors

https://huggingface.co/docs/safetensors has the format. Rows of a tensor lie side by side, so a
rank's part of one is a single range.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor

from offbeat.contracts.base import Contract
from offbeat.objects import S3ObjectStore

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The library's own limit."""
DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Of weights: a base model has no others."""


class Rows(Protocol):
    """A tensor in a file."""

    def get_shape(self) -> list[int]:
        """Of all of it."""
        ...

    def __getitem__(self, rows: slice) -> Tensor:
        """Read these rows, and no others."""
        ...


class TensorFile(Protocol):
    """A file, open."""

    def get_slice(self, name: str) -> Rows:
        """One of its tensors."""
        ...


WeightFiles = Mapping[str, TensorFile]
"""The file of each tensor."""
OpenWeights = Callable[[Path], AbstractContextManager[WeightFiles]]
"""Opens the weights of the model in this folder."""


@contextmanager
def weights_of_folder(folder: Path) -> Iterator[WeightFiles]:
    """Those that lie in the folder."""
    files: dict[str, TensorFile] = {}
    with ExitStack() as opened:
        for path in sorted(folder.glob("*.safetensors")):
            file = opened.enter_context(safe_open(path, framework="pt"))
            files.update(dict.fromkeys(file.keys(), cast(TensorFile, file)))
        yield files


def weights_of_store(store: S3ObjectStore, prefix: str) -> WeightFiles:
    """Those below a prefix. Raises ValueError for an object that is no such file."""
    files: dict[str, TensorFile] = {}
    for key in store.list(prefix):
        if key.endswith(".safetensors"):
            file = StoredFile.open(store, key)
            files.update(dict.fromkeys(file.header, file))
    return files


class _Entry(Contract):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file in the store. See `TensorFile`."""

    header: Mapping[str, _Entry]
    first_byte: int
    """Of the tensors, within the file."""
    read: Callable[[int, int], bytes]
    """The bytes of the file from the first number up to the second."""

    @classmethod
    def open(cls, store: S3ObjectStore, key: str) -> "StoredFile":
        """Read the header. Raises ValueError where there is none."""

        def read(start: int, stop: int) -> bytes:
            return store.get_range(key, start, stop)

        room = min((store.size_bytes(key) or 0) - LENGTH_BYTES, HEADER_BYTES_MAX)
        length = int.from_bytes(read(0, LENGTH_BYTES), "little") if room > 0 else 0
        if not 0 < length <= room:
            raise ValueError(f"{key!r} is no safetensors file: its header has {length} bytes")
        first_byte = LENGTH_BYTES + length
        try:
            header = json.loads(read(LENGTH_BYTES, first_byte))
            header.pop("__metadata__", None)
            entries = _HEADER.validate_python(header)
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{key!r} is no safetensors file: {error}") from error
        return cls(header=entries, first_byte=first_byte, read=read)

    def get_slice(self, name: str) -> "StoredRows":
        """See `TensorFile`. Raises ValueError for a type that no weight has."""
        entry = self.header[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name!r} is {entry.dtype}, and not one of {', '.join(DTYPES)}")
        return StoredRows(file=self, entry=entry)


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """A tensor in the store. See `Rows`."""

    file: StoredFile
    entry: _Entry

    def get_shape(self) -> list[int]:
        """See `Rows`."""
        return list(self.entry.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        """See `Rows`."""
        dtype, (num_rows, *rest) = DTYPES[self.entry.dtype], self.entry.shape
        start, stop, _ = rows.indices(num_rows)
        row_bytes = math.prod(rest) * dtype.itemsize
        origin = self.file.first_byte + self.entry.data_offsets[0]
        body = self.file.read(origin + start * row_bytes, origin + stop * row_bytes)
        return torch.frombuffer(bytearray(body), dtype=dtype).view(stop - start, *rest)
