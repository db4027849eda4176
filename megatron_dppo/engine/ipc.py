"""A bucket handed to an engine on the same host as a handle of memory, not as bytes.

SGLang unpickles what it is given; this side only pickles, and imports nothing of SGLang. On a CPU the
handle names a file in shared memory (torch's ``file_system`` strategy: file descriptors can't cross to
a process that is no child, and kill the server). On a GPU it is a CUDA IPC handle: written after
SGLang's and torch's sources, not yet run on a GPU.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_ARGUMENT = 6
"""Of ``rebuild_cuda_tensor``'s arguments: the device's index, in whose place SGLang takes its UUID
(``sglang.srt.utils.patch_torch``)."""


def shared_empty(size: int, device: torch.device | str) -> Tensor:
    """``size`` bytes that another process can open; on a CPU in a file under ``/dev/shm``."""
    if torch.device(device).type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    with _file_system_sharing():
        return torch.empty(size, dtype=torch.uint8).share_memory_()


def shared_payloads(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    data: Tensor,
    ranks: int,
) -> list[str]:
    """One serialised handle of ``data`` for each engine rank, in base64.

    A handle counts as one holder of the memory until its rank has opened and dropped it, so each
    rank gets its own.
    """
    bucket = {"flattened_tensor": data, "metadata": _metadata(names, shapes, dtype)}
    with _file_system_sharing():
        return [base64.b64encode(_pickled(bucket)).decode() for _ in range(ranks)]


def named_by_uuid(
    rebuild: Callable[..., Any], arguments: tuple[Any, ...], uuid_of: Callable[[int], str]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """torch's recipe for a tensor in another process, with a CUDA device named by its UUID.

    An index means another device to a process with another ``CUDA_VISIBLE_DEVICES``.
    """
    if rebuild is not reductions.rebuild_cuda_tensor:
        return rebuild, arguments
    changed = list(arguments)
    changed[_DEVICE_ARGUMENT] = uuid_of(changed[_DEVICE_ARGUMENT])
    return rebuild, tuple(changed)


def _metadata(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[SimpleNamespace]:
    """What SGLang reads of its ``FlattenedTensorMetadata``, in a type that its unpickler admits."""
    entries, end = [], 0
    for name, dims in zip(names, shapes, strict=True):
        shape = torch.Size(dims)
        size = shape.numel() * dtype.itemsize
        start, end = end, end + size
        place = {"start_idx": start, "end_idx": end, "numel": size}
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=dtype, **place))
    return entries


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            return named_by_uuid(rebuild, arguments, _uuid)
        return NotImplemented


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
