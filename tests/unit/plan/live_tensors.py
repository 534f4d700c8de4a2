"""Counts the bytes of all tensors that are alive, and the most that were alive at once."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """While it is entered, every storage that an operation makes counts until it is freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """These count from the beginning."""
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in tensors:
            self._count(tensor)
        self._look()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run the operation and count what it gives."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        self._look()
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))

    def _look(self) -> None:
        """A storage may also have been given back while it lives, as FSDP2 does with its own."""
        alive = [storage for one in self._alive.values() if (storage := one()) is not None]
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in alive))
