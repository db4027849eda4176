"""How one Megatron parameter is made of Hugging Face tensors, and how tensor parallelism cuts it.

A split is a function ``(sources, shape, rank, size) -> Shard``: the part of the parameter on one of ``size``
tensor-parallel ranks, as block copies out of the source tensors. Families name splits in their tables; nothing else in
the package knows that queries are interleaved or that gates and ups are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.shape import ModelShape

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """``local.narrow(dim, local_start, length) = source.narrow(dim, source_start, length)``; other dims whole."""

    source: int
    dim: int
    source_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class Shard:
    """One rank's part: its local shape, and the blocks that fill it. What no block covers is zero padding."""

    shape: Dims
    blocks: tuple[Block, ...]


Split = Callable[[Sequence[Dims], ModelShape, int, int], Shard]


def replicated(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """The whole tensor on every rank (norms, the router)."""
    (dims,) = sources
    return Shard(dims, (Block(0, 0, 0, 0, dims[0]),))


def column_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Each source cut along its output (dim 0), the parts stacked: one linear, or ``[gate_r; up_r]``."""
    return _cut_and_stack(sources, 0, rank, size)


def row_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut along the input (dim 1)."""
    return _cut_and_stack(sources, 1, rank, size)


def vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Rows padded with zeros to a multiple of ``size``, then cut."""
    (dims,) = sources
    rows = padded_vocab_size(dims[0], size) // size
    start = rank * rows
    length = max(0, min(dims[0] - start, rows))
    blocks = (Block(0, 0, start, 0, length),) if length else ()
    return Shard((rows, *dims[1:]), blocks)


def query_groups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Q, K, V interleaved by query group, ``[q.. k v][q.. k v]..``, then cut along dim 0.

    With more ranks than groups a rank holds part of a group, as Megatron-Core's own cut does.
    """
    query, key, value = (dims[0] // shape.num_query_groups for dims in sources)
    starts = (0, query, query + key, query + key + value)
    per_group = starts[-1]
    rows = _share(per_group * shape.num_query_groups, size, "rows of linear_qkv")
    low, high = rank * rows, (rank + 1) * rows
    blocks = []
    for group in range(low // per_group, -(-high // per_group)):
        for source, width in enumerate((query, key, value)):
            at = group * per_group + starts[source]
            first, last = max(at, low), min(at + width, high)
            if first < last:
                blocks.append(
                    Block(source, 0, group * width + first - at, first - low, last - first)
                )
    return Shard((rows, *sources[0][1:]), tuple(blocks))


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _cut_and_stack(sources: Sequence[Dims], dim: int, rank: int, size: int) -> Shard:
    blocks, at = [], 0
    for index, dims in enumerate(sources):
        length = _share(dims[dim], size, f"dim {dim} of {dims}")
        blocks.append(Block(index, dim, rank * length, at, length))
        at += length
    local = list(sources[0])
    local[dim] = at
    return Shard(tuple(local), tuple(blocks))


def _share(total: int, size: int, what: str) -> int:
    if total % size:
        raise LayoutError(f"{what}: {total} is not divisible by {size} tensor-parallel ranks")
    return total // size
