"""Count the bytes of a trainer's tensors: of given tensors, of tensors that autograd saves, and of new tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; a storage of several tensors counts once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@dataclass
class SavedPeak:
    """Bytes that autograd keeps for backward: ``live`` now, and at most ``peak``; each storage counts once."""

    live: int = 0
    peak: int = 0
    # Address of a storage -> the number of saved tensors in the storage, and the storage's bytes.
    _users: dict[int, int] = field(default_factory=dict)
    _bytes: dict[int, int] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> int:
        """Add a tensor that autograd saves. Return its key for ``drop``."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._users[key] = self._users.get(key, 0) + 1
        if self._users[key] == 1:
            self._bytes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        return key

    def drop(self, key: int) -> None:
        """Remove a tensor that autograd has released; ``key`` is the result of ``add``."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.live -= self._bytes.pop(key)


class _SavedTensor:
    def __init__(self, tensor: Tensor) -> None:
        # Detach: if a function saves its own output, the tensor and the graph would keep each other alive for ever.
        self.tensor = tensor.detach()


@contextmanager
def saved_for_backward(ignored: Iterable[Tensor]) -> Iterator[SavedPeak]:
    """Count the bytes that autograd saves within the block. The storages of ``ignored`` (the weights) do not count."""
    saved_bytes = SavedPeak()
    ignored_storages = {t.untyped_storage()._cdata for t in ignored}

    def pack(tensor: Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        if tensor.untyped_storage()._cdata not in ignored_storages:
            key = saved_bytes.add(tensor)
            weakref.finalize(saved, saved_bytes.drop, key)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield saved_bytes


class LiveTensors(TorchDispatchMode):
    """A dispatch mode that counts the bytes of the storages that operations allocate, until the storages are freed.

    ``peak``: the largest sum of these bytes since the mode began. It excludes temporaries inside an operation, and
    storages that existed before the mode began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs: set[int] = set()
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                inputs.add(value.untyped_storage()._cdata)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                # The result of an operation in place, or a view, has the storage of an input.
                storage = x.untyped_storage()
                if storage._cdata not in inputs | self._storages:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        self._storages.add(key)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._bytes -= size
