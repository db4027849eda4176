"""Who provides which part of every Hugging Face tensor, and the same cut into buckets for streaming.

Each element comes from exactly one rank (the primary holder of its shard). A bucket's tensors are gathered on its
``receiver``: all on rank 0, or (``spread``) each on the rank that holds most of it, which moves the fewest bytes that
any choice of receivers can: of every tensor, what its best holder lacks; or on one rank of the node that holds most of
it, which moves the fewest bytes between nodes with the fewest receivers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from megatron_dppo.model.adapters import Adapters, adapter_parameters, adapter_tensors
from megatron_dppo.model.layout import Dims, Layout
from megatron_dppo.model.mapping import LocalParameter, Segment, hf_tensors, primary_parameters
from megatron_dppo.model.shape import ModelShape

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
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSources:
    """A Hugging Face tensor and the pieces that tile it, ordered by their place in it."""

    name: str
    shape: Dims
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are gathered together on rank ``receiver``.

    Every other rank sends one flat tensor: its pieces in the plan's order, each contiguous; the receiver lays them out
    among its own. All ranks make the same plan, so nothing but weights travels.
    """

    tensors: tuple[TensorSources, ...]
    receiver: int = 0

    @property
    def elements(self) -> int:
        """Elements of all its tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def elements_by_rank(self) -> Counter[int]:
        """Elements that each sending rank provides; ranks that send nothing are absent."""
        elements = Counter[int]()
        for tensor in self.tensors:
            elements.update(elements_held(tensor))
        return elements


def gather_plan(shape: ModelShape, layout: Layout) -> list[TensorSources]:
    """For every Hugging Face tensor, in model order, who provides which part of it."""
    return _plan(hf_tensors(shape), layout, lambda rank: primary_parameters(shape, layout, rank))


def adapter_buckets_plan(
    adapters: Adapters, shape: ModelShape, layout: Layout, bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """The same of every A and B of ``adapter_tensors``, all on rank 0, in buckets as ``hf_buckets_plan`` cuts them."""

    def parameters(rank: int) -> list[LocalParameter]:
        return [p for p in adapter_parameters(adapters, shape, layout, rank) if p.is_primary]

    plan = _plan(adapter_tensors(adapters, shape), layout, parameters)
    return [Bucket(tuple(group)) for group in _groups(plan, bucket_bytes, item_bytes)]


def _plan(
    tensors: dict[str, Dims], layout: Layout, primary_of: Callable[[int], list[LocalParameter]]
) -> list[TensorSources]:
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for rank in range(layout.world_size):
        c = layout.coordinates(rank)
        # A replica of both parts, dense and experts, is primary for nothing: its tables needn't be unrolled.
        if c.edp and (c.dp or c.cp):
            continue
        for p in primary_of(rank):
            for segment in p.segments:
                pieces[segment.hf_name].append(Piece(rank, p.chunk, p.name, p.shape, segment))
    return [
        TensorSources(
            name, dims, tuple(sorted(pieces[name], key=lambda piece: piece.segment.hf_start))
        )
        for name, dims in tensors.items()
    ]


def hf_buckets_plan(
    shape: ModelShape,
    layout: Layout,
    bucket_bytes: int,
    item_bytes: int,
    *,
    spread: bool = False,
    ranks_per_node: int = 1,
) -> list[Bucket]:
    """``gather_plan`` cut into buckets of at most ``bucket_bytes``; a larger tensor has one to itself.

    ``item_bytes``: bytes of an element as it travels. ``spread``: each tensor is gathered on its ``best_receiver``, and
    receivers take turns, so that one sends on while others gather; else all on rank 0, in model order.
    ``ranks_per_node`` above 1: one receiver in each group of so many ranks, ``node_receivers``.
    """
    sources = gather_plan(shape, layout)
    receivers = node_receivers(sources, ranks_per_node) if spread else [0] * len(sources)
    tensors: dict[int, list[TensorSources]] = {}
    for tensor, receiver in zip(sources, receivers, strict=True):
        tensors.setdefault(receiver, []).append(tensor)
    return buckets_in_turn(tensors, bucket_bytes, item_bytes)


def buckets_in_turn(
    tensors: Mapping[int, list[TensorSources]], bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """Each receiver's ``tensors`` in buckets; the receivers take turns."""
    buckets = [
        [Bucket(tuple(group), receiver) for group in _groups(share, bucket_bytes, item_bytes)]
        for receiver, share in sorted(tensors.items())
    ]
    return [bucket for turn in zip_longest(*buckets) for bucket in turn if bucket is not None]


def best_receiver(tensor: TensorSources, ranks_per_node: int = 1) -> int:
    """The rank (or node, of several ranks) that holds most of ``tensor``; the lowest of several."""
    return _most(elements_held(tensor, ranks_per_node))


def node_receivers(tensors: Sequence[TensorSources], ranks_per_node: int) -> list[int]:
    """A receiver for each tensor, one rank of a node: on the node that holds most of it, the rank that holds most of
    all the tensors of that node; the lowest of several. Nodes are runs of ``ranks_per_node`` ranks."""
    nodes = [best_receiver(tensor, ranks_per_node) for tensor in tensors]
    elements_by_node: dict[int, Counter[int]] = defaultdict(Counter)
    for tensor, node in zip(tensors, nodes, strict=True):
        for rank, elements in elements_held(tensor).items():
            if rank // ranks_per_node == node:
                elements_by_node[node][rank] += elements
    fullest = {node: _most(elements) for node, elements in elements_by_node.items()}
    return [fullest[node] for node in nodes]


def elements_between_nodes(bucket: Bucket, ranks_per_node: int) -> int:
    """Elements that come to the bucket's receiver from ranks of other nodes."""
    node = bucket.receiver // ranks_per_node
    counts = bucket.elements_by_rank.items()
    return sum(count for rank, count in counts if rank // ranks_per_node != node)


def gathered_elements(tensor: TensorSources, receiver: int) -> int:
    """Elements that must travel for ``receiver`` to have ``tensor``."""
    return tensor.elements - elements_held(tensor).get(receiver, 0)


def fewest_gathered_elements(shape: ModelShape, layout: Layout) -> int:
    """The static lower bound of what a gather of full tensors moves, whoever receives: over all tensors, the elements
    that the best holder lacks.
    """
    return sum(gathered_elements(t, best_receiver(t)) for t in gather_plan(shape, layout))


def elements_held(tensor: TensorSources, ranks_per_node: int = 1) -> Counter[int]:
    """Elements that each rank (or node, of several ranks) provides."""
    elements = Counter[int]()
    for piece in tensor.pieces:
        elements[piece.rank // ranks_per_node] += piece.elements
    return elements


def _most(elements: Counter[int]) -> int:
    return min(elements, key=lambda holder: (-elements[holder], holder))


def _groups(
    plan: list[TensorSources], bucket_bytes: int, item_bytes: int
) -> Iterator[list[TensorSources]]:
    group: list[TensorSources] = []
    filled = 0
    # Order is kept, where a better packing would save a bucket: all ranks cut the same plan without a word.
    for tensor in plan:
        size = tensor.elements * item_bytes
        if group and filled + size > bucket_bytes:
            yield group
            group, filled = [], 0
        group.append(tensor)
        filled += size
    if group:
        yield group
