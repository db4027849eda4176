"""Splits of parameters among tensor-parallel ranks: the rows or columns of the full tensor that each rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError, ModelConfigError
from megatron_dppo.model.shape import DeltaNet, ModelShape

Dims = tuple[int, ...]
ENGINE_VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this, or of this times TP where TP does not divide the result."""


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
    """One rank's part: its local shape, and the blocks that fill it. Elements outside of blocks are zero padding."""

    shape: Dims
    blocks: tuple[Block, ...]


Split = Callable[[Sequence[Dims], ModelShape, int, int], Shard]


def replicated(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """The whole tensor on every rank (norms, the router); several sources are stacked."""
    return _cut_and_stack(sources, 0, 0, 1)


def column_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Each source cut along its output (dim 0), the parts stacked: one linear, or ``[gate_r; up_r]``."""
    return _cut_and_stack(sources, 0, rank, size)


def row_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut along the input (dim 1)."""
    return _cut_and_stack(sources, 1, rank, size)


def vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Rows padded with zeros to a multiple of ``size``, then cut (Megatron)."""
    (dims,) = sources
    return _cut_rows(dims, rank, padded_vocab_size(dims[0], size) // size)


def engine_vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Rows padded as ENGINE_VOCABULARY_MULTIPLE says, then cut (SGLang)."""
    (dims,) = sources
    multiple = ENGINE_VOCABULARY_MULTIPLE
    if -(-dims[0] // multiple) * multiple % size:
        multiple *= size
    return _cut_rows(dims, rank, -(-dims[0] // multiple) * multiple // size)


def query_groups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Q, K, V interleaved by query group, ``[q.. k v][q.. k v]..``, then cut along dim 0 (Megatron)."""
    query, key, value = (dims[0] // shape.num_query_groups for dims in sources)
    starts = (0, query, query + key, query + key + value)
    per_group = starts[-1]
    rows = _share(per_group * shape.num_query_groups, size, "rows of linear_qkv")
    low, high = rank * rows, (rank + 1) * rows
    blocks = []
    # If there are more ranks than groups, a rank holds part of a group: Megatron-Core cuts at the end of a rank's rows.
    for group in range(low // per_group, -(-high // per_group)):
        for source, width in enumerate((query, key, value)):
            start = group * per_group + starts[source]
            block_start = max(start, low)
            block_end = min(start + width, high)
            if block_start < block_end:
                source_start = group * width + block_start - start
                length = block_end - block_start
                blocks.append(Block(source, 0, source_start, block_start - low, length))
    return Shard((rows, *sources[0][1:]), tuple(blocks))


def stacked_heads(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """``[q_r; k_r; v_r]`` by heads (SGLang)."""
    # If there are fewer K/V heads than ranks, neighbouring ranks hold copies of the same head.
    copies = max(1, size // shape.num_query_groups)
    kv_size, kv_rank = size // copies, rank // copies
    blocks, rows = [], 0
    for index, dims in enumerate(sources):
        parts, part = (size, rank) if index == 0 else (kv_size, kv_rank)
        length = dims[0] // parts
        blocks.append(Block(index, 0, part * length, rows, length))
        rows += length
    return Shard((rows, *sources[0][1:]), tuple(blocks))


def gated_query_groups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Queries and their gates, K and V by query group, ``[q.. gate.. k v]..``, then cut along dim 0 (Megatron).

    The source of queries has the gate of each head behind the head's query.
    """
    head = shape.head_dim
    groups = _share(shape.num_query_groups, size, "key-value heads")
    heads = shape.num_attention_heads // shape.num_query_groups
    blocks: list[Block] = []
    row = 0
    for group in range(rank * groups, (rank + 1) * groups):
        for part in range(2):
            for number in range(group * heads, (group + 1) * heads):
                blocks.append(Block(0, 0, (2 * number + part) * head, row, head))
                row += head
        for source in (1, 2):
            blocks.append(Block(source, 0, group * head, row, head))
            row += head
    return Shard((row, *sources[0][1:]), tuple(blocks))


def delta_sections(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Delta nets: ``[q_r; k_r; v_r; ..]`` of a source ``[q; k; v]``, and of further sources, cut along dim 0."""
    delta = _delta_of(shape)
    blocks: list[Block] = []
    row = 0
    sections = [(0, delta.key_width), (0, delta.key_width), (0, delta.value_width)]
    sections += [(number, dims[0]) for number, dims in enumerate(sources) if number]
    starts = [0] * len(sources)
    for source, width in sections:
        length = _share(width, size, "rows of a delta net")
        blocks.append(Block(source, 0, starts[source] + rank * length, row, length))
        row += length
        starts[source] += width
    return Shard((row, *sources[0][1:]), tuple(blocks))


def delta_inputs_by_head(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Delta nets: ``[q_r; k_r; v_r; z_r; b_r; a_r]`` of two sources by key head, ``[q k v.. z..]..`` and
    ``[b.. a..]..`` (Megatron)."""
    delta = _delta_of(shape)
    heads = _share(delta.key_heads, size, "key heads of a delta net")
    values = delta.value_heads // delta.key_heads
    widths = (
        (0, delta.key_size),
        (0, delta.key_size),
        (0, values * delta.value_size),
        (0, values * delta.value_size),
        (1, values),
        (1, values),
    )
    rows_per_head = [sum(width for source, width in widths if source == s) for s in (0, 1)]
    offsets = [0, 0]
    blocks: list[Block] = []
    row = 0
    for source, width in widths:
        for head in range(rank * heads, (rank + 1) * heads):
            start = head * rows_per_head[source] + offsets[source]
            blocks.append(Block(source, 0, start, row, width))
            row += width
        offsets[source] += width
    return Shard((row, *sources[0][1:]), tuple(blocks))


def _delta_of(shape: ModelShape) -> DeltaNet:
    if shape.delta is None:
        raise ModelConfigError(f"a {shape.family} model without delta nets has a row of one")
    return shape.delta


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size: Megatron's rows over all its ranks.

    The rows beyond ``vocab_size`` belong to no token: statistics and checkpoints exclude them.
    """
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def _cut_rows(dims: Dims, rank: int, rows: int) -> Shard:
    start = rank * rows
    # The last ranks of a padded vocabulary may hold fewer rows than the others, or nothing but padding.
    length = max(0, min(dims[0] - start, rows))
    blocks = (Block(0, 0, start, 0, length),) if length else ()
    return Shard((rows, *dims[1:]), blocks)


def _cut_and_stack(sources: Sequence[Dims], dim: int, rank: int, size: int) -> Shard:
    blocks, width = [], 0
    for index, dims in enumerate(sources):
        length = _share(dims[dim], size, f"dim {dim} of {dims}")
        blocks.append(Block(index, dim, rank * length, width, length))
        width += length
    local = list(sources[0])
    local[dim] = width
    return Shard(tuple(local), tuple(blocks))


def _share(total: int, size: int, subject: str) -> int:
    if total % size:
        raise LayoutError(f"{subject}: {total} is not divisible by {size} tensor-parallel ranks")
    return total // size
