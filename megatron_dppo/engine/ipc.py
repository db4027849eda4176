"""A bucket handed to an engine on the same host as a handle of memory, not as bytes.

SGLang unpickles what it is given; this side only pickles. On a CPU the handle names a file in shared
memory (torch's ``file_system`` strategy: file descriptors can't cross to a process that is no child,
and kill the server). On a GPU it is a CUDA IPC handle: written after SGLang's source, not yet run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor


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


def _metadata(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Any]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    entries, end = [], 0
    for name, dims in zip(names, shapes, strict=True):
        size = torch.Size(dims).numel() * dtype.itemsize
        start, end = end, end + size
        entries.append(FlattenedTensorMetadata(name, torch.Size(dims), dtype, start, end, size))
    return entries


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


@contextmanager
def _file_system_sharing() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
