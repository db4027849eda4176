"""Splits of parameters among tensor-parallel ranks: the rows or columns of the full tensor that each rank has.

A split is a function ``(sources, shape, rank, size) -> Shard``: the part of a parameter on one of ``size``
tensor-parallel ranks, as block copies from the source tensors. Families name splits in their tables; no other module
knows that queries are interleaved with keys and values, or that gate and up projections are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dppo.model.errors import LayoutError, ModelConfigError
from megatron_dppo.model.shape import DeltaNet, ModelShape

Dims = tuple[int, ...]
ENGINE_VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this number; if TP does not divide the result, to a multiple of this
number times TP."""


@dataclass(frozen=True)
class Block:
    """``local.narrow(dim, local_start, length) = source.narrow(dim, source_start, length)``; other dims whole.

    With ``source_step`` n the block has every n-th index of the source, from ``source_start`` on.
    """

    source: int
    dim: int
    source_start: int
    local_start: int
    length: int
    source_step: int = 1


@dataclass(frozen=True)
class Shard:
    """One rank's part: its local shape, and the blocks that fill it. Elements outside of blocks are zero padding."""

    shape: Dims
    blocks: tuple[Block, ...]


Split = Callable[[Sequence[Dims], ModelShape, int, int], Shard]
"""Function from (dimensions of the source tensors, shape, rank, number of ranks) to the rank's part."""


def replicated(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Hold the whole tensor on every rank (norms, the router). Several sources are stacked."""
    return _cut_and_stack(sources, 0, 0, 1)


def column_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut each source along its outputs (dim 0) and stack the parts: one linear, or ``[gate_r; up_r]``."""
    return _cut_and_stack(sources, 0, rank, size)


def gates_then_ups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut ``[gate_r; up_r]`` from a source whose rows alternate, ``gate, up, gate, up, ..`` (Megatron)."""
    (dims,) = sources
    rows = _share(dims[0], 2 * size, f"dim 0 of {dims}")
    first_gate = 2 * rank * rows
    gates = Block(0, 0, first_gate, 0, rows, source_step=2)
    ups = Block(0, 0, first_gate + 1, rows, rows, source_step=2)
    return Shard((2 * rows, *dims[1:]), (gates, ups))


def on_first_rank(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Hold the whole tensor on the first rank and zeros on all other ranks (SGLang). This is the split of a bias that
    each rank adds before the ranks' outputs are summed."""
    if rank == 0:
        return replicated(sources, shape, rank, size)
    (dims,) = sources
    return Shard(dims, ())


def row_parallel(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut along the input (dim 1)."""
    return _cut_and_stack(sources, 1, rank, size)


def vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Pad the rows with zeros to a multiple of ``size``, then cut (Megatron)."""
    (dims,) = sources
    return _cut_rows(dims, rank, padded_vocab_size(dims[0], size) // size)


def engine_vocabulary(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Pad the rows by the rule of ENGINE_VOCABULARY_MULTIPLE, then cut (SGLang)."""
    (dims,) = sources
    return _cut_rows(dims, rank, engine_vocab_size(dims[0], size) // size)


def query_groups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Interleave Q, K, V by query group, ``[q.. k v][q.. k v]..``, then cut along dim 0 (Megatron)."""
    widths = [dims[0] // shape.num_query_groups for dims in sources]
    group_rows = sum(widths)
    rows = _share(group_rows * shape.num_query_groups, size, "rows of linear_qkv")
    # ``rank_start``, ``section_start``, ``start`` and their ends are rows of the interleaved tensor of all ranks.
    rank_start = rank * rows
    rank_end = rank_start + rows
    blocks = []
    # The rank's rows may begin or end inside of a group, if there are more ranks than groups.
    for group in range(rank_start // group_rows, -(-rank_end // group_rows)):
        section_start = group * group_rows
        for source, width in enumerate(widths):
            section_end = section_start + width
            # The rows of the section that the rank has.
            start = max(section_start, rank_start)
            end = min(section_end, rank_end)
            if start < end:
                source_start = group * width + (start - section_start)
                blocks.append(Block(source, 0, source_start, start - rank_start, end - start))
            section_start = section_end
    return Shard((rows, *sources[0][1:]), tuple(blocks))


def stacked_heads(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Stack each rank's heads, ``[q_r; k_r; v_r]`` (SGLang)."""
    # If there are fewer K/V heads than ranks, neighbouring ranks hold copies of the same head.
    copies = max(1, size // shape.num_query_groups)
    blocks = []
    rows = 0
    for index, dims in enumerate(sources):
        parts = size
        part = rank
        is_query = index == 0
        if not is_query:
            parts = size // copies
            part = rank // copies
        length = dims[0] // parts
        blocks.append(Block(index, 0, part * length, rows, length))
        rows += length
    return Shard((rows, *sources[0][1:]), tuple(blocks))


def gated_query_groups(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Interleave queries, their gates, K and V by query group, ``[q.. gate.. k v]..``, then cut along dim 0 (Megatron).

    The source of queries has the gate of each head after the head's query.
    """
    head = shape.head_dim
    groups = _share(shape.num_query_groups, size, "key-value heads")
    heads = shape.num_attention_heads // shape.num_query_groups
    blocks: list[Block] = []
    row = 0
    for group in range(rank * groups, (rank + 1) * groups):
        # Part 0 of a head in the source is its query, part 1 its gate.
        for part in (0, 1):
            for number in range(group * heads, (group + 1) * heads):
                blocks.append(Block(0, 0, (2 * number + part) * head, row, head))
                row += head
        for source in (1, 2):
            blocks.append(Block(source, 0, group * head, row, head))
            row += head
    return Shard((row, *sources[0][1:]), tuple(blocks))


def delta_sections(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Cut each section along dim 0 and stack the parts, ``[q_r; k_r; v_r; ..]`` (delta nets).

    The sections are q, k and v of the first source ``[q; k; v]``, and each further source as a whole.
    """
    delta = _delta_of(shape)
    sections = [(0, delta.key_width), (0, delta.key_width), (0, delta.value_width)]
    for number in range(1, len(sources)):
        sections.append((number, sources[number][0]))
    blocks: list[Block] = []
    row = 0
    # For each source: the row where its next section begins.
    start_of_source = [0] * len(sources)
    for source, width in sections:
        length = _share(width, size, "rows of a delta net")
        blocks.append(Block(source, 0, start_of_source[source] + rank * length, row, length))
        row += length
        start_of_source[source] += width
    return Shard((row, *sources[0][1:]), tuple(blocks))


def delta_inputs_by_head(sources: Sequence[Dims], shape: ModelShape, rank: int, size: int) -> Shard:
    """Take a rank's key heads from two sources, and stack ``[q_r; k_r; v_r; z_r; b_r; a_r]`` (delta nets, Megatron).

    The rows of both sources are ordered by key head: ``[q k v.. z..]..`` and ``[b.. a..]..``.
    """
    delta = _delta_of(shape)
    heads = _share(delta.key_heads, size, "key heads of a delta net")
    value_heads = delta.value_heads // delta.key_heads
    # The sections q, k, v, z, b and a of one key head: for each section, its source and its number of rows.
    sections = (
        (0, delta.key_size),
        (0, delta.key_size),
        (0, value_heads * delta.value_size),
        (0, value_heads * delta.value_size),
        (1, value_heads),
        (1, value_heads),
    )
    rows_per_head = [0, 0]
    for source, width in sections:
        rows_per_head[source] += width
    # For each source: where its next section begins, in rows from the begin of a key head.
    offsets = [0, 0]
    blocks: list[Block] = []
    row = 0
    for source, width in sections:
        for head in range(rank * heads, (rank + 1) * heads):
            start = head * rows_per_head[source] + offsets[source]
            blocks.append(Block(source, 0, start, row, width))
            row += width
        offsets[source] += width
    return Shard((row, *sources[0][1:]), tuple(blocks))


def _delta_of(shape: ModelShape) -> DeltaNet:
    if shape.delta is None:
        raise ModelConfigError(
            f"{shape.family}: the family has a tensor of a delta net, but the model has no delta nets"
        )
    return shape.delta


def ceil_to(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of Megatron's embedding over all ranks: the vocabulary, rounded up to a multiple of TP.

    The rows beyond ``vocab_size`` belong to no token: statistics and checkpoints exclude them.
    """
    return ceil_to(vocab_size, tensor_parallel)


def engine_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of SGLang's embedding over all ranks: the vocabulary, padded as ENGINE_VOCABULARY_MULTIPLE
    says."""
    rows = ceil_to(vocab_size, ENGINE_VOCABULARY_MULTIPLE)
    if rows % tensor_parallel:
        rows = ceil_to(vocab_size, ENGINE_VOCABULARY_MULTIPLE * tensor_parallel)
    return rows


def _cut_rows(dims: Dims, rank: int, rows: int) -> Shard:
    start = rank * rows
    # The last ranks of a padded vocabulary may hold fewer rows than the first ranks, or only padding.
    length = max(0, min(dims[0] - start, rows))
    blocks = (Block(0, 0, start, 0, length),) if length else ()
    return Shard((rows, *dims[1:]), blocks)


def _cut_and_stack(sources: Sequence[Dims], dim: int, rank: int, size: int) -> Shard:
    blocks = []
    width = 0
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
