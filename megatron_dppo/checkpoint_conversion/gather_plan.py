"""Who provides which part of every Hugging Face tensor, and the same cut into buckets for streaming.

Each element comes from exactly one rank (the primary holder of its shard), so the bytes that move are the lower bound:
the model, less what the receiving rank holds itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_dppo.checkpoint_conversion.layout import Layout
from megatron_dppo.checkpoint_conversion.mapping import Segment, hf_tensors, primary_parameters
from megatron_dppo.checkpoint_conversion.model_shape import ModelShape
from megatron_dppo.checkpoint_conversion.splits import Dims

ParameterKey = tuple[int, str]
"""(model chunk, name in that chunk)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a Hugging Face tensor: ``segment`` of its parameter ``name`` (of ``local_shape``)."""

    rank: int
    chunk: int
    name: str
    local_shape: Dims
    segment: Segment

    @property
    def key(self) -> ParameterKey:
        """Names the parameter on its rank."""
        return self.chunk, self.name

    @property
    def shape(self) -> Dims:
        """Shape of the block."""
        dims = list(self.local_shape)
        dims[self.segment.dim] = self.segment.length
        return tuple(dims)

    @property
    def elements(self) -> int:
        """Elements of the block."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class TensorSources:
    """A Hugging Face tensor and the pieces that tile it, ordered by their place in it."""

    name: str
    shape: torch.Size
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors that are gathered together.

    Every rank sends one flat tensor: its pieces in the plan's order, each contiguous (``pack``); the receiver lays them
    out (``unpack``). All ranks make the same plan, so nothing but weights travels.
    """

    tensors: tuple[TensorSources, ...]

    @cached_property
    def elements_by_rank(self) -> dict[int, int]:
        """Elements that each sending rank provides; ranks that send nothing are absent."""
        counts: dict[int, int] = {}
        for tensor in self.tensors:
            for piece in tensor.pieces:
                counts[piece.rank] = counts.get(piece.rank, 0) + piece.elements
        return counts

    def pack(self, rank: int, parameters: Mapping[ParameterKey, torch.Tensor]) -> torch.Tensor:
        """What ``rank`` sends: 1-D, of the parameters' dtype; detached from any graph."""
        parts = [
            piece.segment.of_local(parameters[piece.key]).detach().reshape(-1)
            for tensor in self.tensors
            for piece in tensor.pieces
            if piece.rank == rank
        ]
        if parts:
            return torch.cat(parts)
        return next(iter(parameters.values())).detach().new_empty(0)

    def unpack(self, flat_by_rank: Mapping[int, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The full tensors, out of what every rank in ``elements_by_rank`` sent."""
        at = dict.fromkeys(flat_by_rank, 0)
        out = []
        for tensor in self.tensors:
            flat = flat_by_rank[tensor.pieces[0].rank]
            full = flat.new_empty(tensor.shape)
            for piece in tensor.pieces:
                start = at[piece.rank]
                at[piece.rank] = start + piece.elements
                block = flat_by_rank[piece.rank][start : at[piece.rank]]
                piece.segment.of_hf(full).copy_(block.view(piece.shape))
            out.append((tensor.name, full))
        return out


def gather_plan(shape: ModelShape, layout: Layout) -> list[TensorSources]:
    """For every Hugging Face tensor, in model order, who provides which part of it."""
    tensors = hf_tensors(shape)
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        if at.edp and (at.dp or at.cp):
            continue  # a replica of both parts holds nothing primary
        for p in primary_parameters(shape, layout, rank):
            for segment in p.segments:
                pieces[segment.hf_name].append(Piece(rank, p.chunk, p.name, p.shape, segment))
    return [
        TensorSources(
            name, dims, tuple(sorted(pieces[name], key=lambda piece: piece.segment.hf_start))
        )
        for name, dims in tensors.items()
    ]


def hf_buckets_plan(
    shape: ModelShape, layout: Layout, bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """``gather_plan`` cut into buckets of at most ``bucket_bytes``; a larger tensor has one to itself.

    ``item_bytes``: bytes of an element as it travels.
    """
    if bucket_bytes < 1 or item_bytes < 1:
        raise ValueError(
            f"bucket_bytes {bucket_bytes} and item_bytes {item_bytes} must be at least 1"
        )
    return [
        Bucket(tuple(group))
        for group in _groups(gather_plan(shape, layout), bucket_bytes, item_bytes)
    ]


def _groups(
    plan: list[TensorSources], bucket_bytes: int, item_bytes: int
) -> Iterator[list[TensorSources]]:
    group: list[TensorSources] = []
    filled = 0
    for tensor in plan:
        size = tensor.shape.numel() * item_bytes
        if group and filled + size > bucket_bytes:
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += size
    if group:
        yield group
