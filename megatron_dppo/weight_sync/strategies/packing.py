"""A bucket's tensors as the flat bytes that engines take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_dppo.weight_sync.interfaces import Bucket


class Packer:
    """``pieces`` gives the 1-D ``uint8`` pieces of a bucket in the engines' order.

    Pieces that lie one after another in memory are sent from there. Others are copied into one of
    two buffers that take turns: it holds until the second call after.
    """

    def __init__(self, pieces: Callable[[Bucket], list[Tensor]]) -> None:
        self._pieces = pieces
        self._buffers: list[Tensor | None] = [None, None]

    def pack(self, bucket: Bucket) -> Tensor:
        """The flat bytes; a view of the bucket's own memory where that is possible."""
        pieces = self._pieces(bucket)
        flat = adjacent(pieces)
        return self._copied(pieces, _plain) if flat is None else flat

    def copy(self, bucket: Bucket, allocate: Callable[[int, torch.device], Tensor]) -> Tensor:
        """The flat bytes in memory that came from ``allocate(bytes, device)``."""
        return self._copied(self._pieces(bucket), allocate)

    def _copied(
        self, pieces: list[Tensor], allocate: Callable[[int, torch.device], Tensor]
    ) -> Tensor:
        size = sum(piece.numel() for piece in pieces)
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[0] = allocate(size, pieces[0].device)
        return torch.cat(pieces, out=buffer[:size])


def adjacent(pieces: Sequence[Tensor]) -> Tensor | None:
    """The 1-D pieces as one view of the memory in which they lie without a gap; None otherwise."""
    first, end = pieces[0], pieces[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != storage:
            return None
        end += piece.numel()
    return first.as_strided((end - first.data_ptr(),), (1,), first.storage_offset())


def _plain(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
