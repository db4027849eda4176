"""Boxes of the tensors of a ``torch_dist`` checkpoint: which elements a rank holds, writes or wants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """``sizes`` elements along each axis, from ``offsets``."""

    offsets: Dims
    sizes: Dims

    @property
    def elements(self) -> int:
        """Elements inside."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements of both, or None where there are none."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(map(min, self._ends, other._ends))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def _ends(self) -> Dims:
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def of(self, values: torch.Tensor, origin: Dims) -> torch.Tensor:
        """The view of this box in ``values``, whose first element is at ``origin``."""
        for axis, (offset, size, start) in enumerate(
            zip(self.offsets, self.sizes, origin, strict=True)
        ):
            values = values.narrow(axis, offset - start, size)
        return values


@dataclass(frozen=True)
class Block:
    """``box`` of the checkpoint's tensor ``key`` of shape ``dims``.

    ``resizable``: the tensor may be stored in another shape (a padded vocabulary); elements beyond it are zero.
    """

    key: str
    dims: Dims
    box: Box
    dtype: torch.dtype
    resizable: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of its elements."""
        return self.box.elements * self.dtype.itemsize


def flat_boxes(dims: Dims, start: int, stop: int) -> Iterator[Box]:
    """Boxes of a tensor of shape ``dims`` that hold, one after another, its elements ``start .. stop`` in row-major
    order; each is contiguous there. At most two for each axis.
    """
    if start >= stop:
        return
    if len(dims) <= 1:
        yield Box((start,) * len(dims), (stop - start,) * len(dims))
        return
    row = math.prod(dims[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _in_row(dims, last, start - last * row, stop - last * row)
        return
    if start % row:
        yield from _in_row(dims, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0 for _ in dims[1:])), (last - first, *dims[1:]))
    if stop % row:
        yield from _in_row(dims, last, 0, stop % row)


def _in_row(dims: Dims, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(dims[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))
