"""The ranks that provide the parts of every Hugging Face tensor, and a plan that streams the tensors in buckets.

Each element comes from exactly one rank, the primary holder of its shard. The tensors of a bucket are gathered on the
bucket's ``receiver``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType

from megatron_dppo.model.adapters import Adapters, adapter_parameters, adapter_tensors
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import (
    LocalParameter,
    Segment,
    hf_tensors,
    own_dtypes,
    primary_parameters,
)
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.model.splits import Dims
from megatron_dppo.system.groups import consecutive_groups

ParameterKey = tuple[int, str]
"""(model chunk, name in that chunk)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of a Hugging Face tensor: ``segment`` of the rank's parameter ``name``, which has the shape
    ``local_shape``. All ``holders`` have the same part; ``rank`` is the first of them."""

    rank: int
    chunk: int
    name: str
    local_shape: Dims
    segment: Segment
    holders: range = range(0)

    @property
    def key(self) -> ParameterKey:
        """The key of the parameter on its rank."""
        return self.chunk, self.name

    @property
    def shape(self) -> Dims:
        """Shape of the piece."""
        dims = list(self.local_shape)
        dims[self.segment.dim] = self.segment.length
        return tuple(dims)

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TensorSources:
    """A Hugging Face tensor and the pieces that tile it, in the order of their positions.

    ``dtype`` is the tensor's type if it differs from the model's; else None.
    """

    name: str
    shape: Dims
    pieces: tuple[Piece, ...]
    dtype: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that are gathered together on rank ``receiver``.

    Every other rank sends one flat tensor: its pieces in the plan's order, each contiguous. The receiver combines them
    with its own pieces. All ranks compute the same plan, so only weights are sent. All tensors of a bucket have the
    same type.
    """

    tensors: tuple[TensorSources, ...]
    receiver: int = 0

    @property
    def dtype(self) -> str | None:
        """The type of the tensors if it differs from the model's; else None."""
        return self.tensors[0].dtype

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def elements_by_rank(self) -> Counter[int]:
        """The number of elements that each rank provides, by rank, without ranks that provide none."""
        elements = Counter[int]()
        for tensor in self.tensors:
            elements.update(elements_held(tensor))
        return elements


def gather_plan(shape: ModelShape, layout: Layout) -> list[TensorSources]:
    """Return the sources of every Hugging Face tensor, in model order."""
    tensors = hf_tensors(shape)
    return _plan(tensors, layout, partial(primary_parameters, shape, layout), own_dtypes(shape))


def adapter_buckets_plan(
    adapters: Adapters, shape: ModelShape, layout: Layout, bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """Plan the gather of every A and B of ``adapter_tensors`` on rank 0, in buckets of at most ``bucket_bytes``."""

    def primary_of(rank: int) -> list[LocalParameter]:
        return [p for p in adapter_parameters(adapters, shape, layout, rank) if p.is_primary]

    plan = _plan(adapter_tensors(adapters, shape), layout, primary_of)
    groups = _groups(plan, bucket_bytes, item_bytes)
    return [Bucket(tuple(group)) for group in groups]


def _plan(
    tensors: dict[str, Dims],
    layout: Layout,
    primary_of: Callable[[int], list[LocalParameter]],
    dtypes: Mapping[str, str] = MappingProxyType({}),
) -> list[TensorSources]:
    """Return the sources of ``tensors``. ``primary_of(rank)`` returns the parameters that ``rank`` must provide."""
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        # Skip a rank if it has later replicas of the dense part and of the experts: other ranks provide its parameters.
        is_first_of_dense = coordinates.dp == coordinates.cp == 0
        is_first_of_experts = coordinates.edp == 0
        if not (is_first_of_dense or is_first_of_experts):
            continue
        for p in primary_of(rank):
            for segment in p.segments:
                pieces[segment.hf_name].append(
                    Piece(rank, p.chunk, p.name, p.shape, segment, p.holders)
                )
    sources: list[TensorSources] = []
    for name, dims in tensors.items():
        sorted_pieces = sorted(pieces[name], key=attrgetter("segment.hf_start"))
        sources.append(TensorSources(name, dims, tuple(sorted_pieces), dtypes.get(name)))
    return sources


def hf_buckets_plan(
    shape: ModelShape, layout: Layout, bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """Divide ``gather_plan`` into buckets of at most ``bucket_bytes`` that rank 0 receives, in model order.

    A larger tensor has a bucket of its own. Tensors with another type than the model's are in separate buckets, after
    the others.

    Args:
        shape: The model.
        layout: The trainer's layout.
        bucket_bytes: Largest size of a bucket.
        item_bytes: Bytes of an element of the model's type.
    """
    return buckets_in_turn({0: gather_plan(shape, layout)}, bucket_bytes, item_bytes)


def buckets_in_turn(
    tensors: Mapping[int, Sequence[TensorSources]], bucket_bytes: int, item_bytes: int
) -> list[Bucket]:
    """Divide each receiver's ``tensors`` into buckets, and alternate between the receivers."""
    buckets_by_receiver = []
    for receiver, share in sorted(tensors.items()):
        groups = _groups(share, bucket_bytes, item_bytes)
        buckets_by_receiver.append([Bucket(tuple(group), receiver) for group in groups])
    buckets: list[Bucket] = []
    for turn in zip_longest(*buckets_by_receiver):
        buckets += [bucket for bucket in turn if bucket is not None]
    return buckets


def elements_between_nodes(bucket: Bucket, ranks_per_node: int) -> int:
    """Return the number of elements that ranks of other nodes send to the bucket's receiver."""
    node = bucket.receiver // ranks_per_node
    counts = bucket.elements_by_rank.items()
    return sum(count for rank, count in counts if rank // ranks_per_node != node)


def elements_held(tensor: TensorSources) -> Counter[int]:
    """Count the elements that each rank provides."""
    elements = Counter[int]()
    for piece in tensor.pieces:
        elements[piece.rank] += piece.elements
    return elements


def _groups(
    tensors: Sequence[TensorSources], bucket_bytes: int, item_bytes: int
) -> Iterator[list[TensorSources]]:
    """Yield the tensors of each bucket: first the buckets of the model's type, then the buckets of each other type."""
    tensors_by_dtype: dict[str | None, list[TensorSources]] = {None: []}
    for tensor in tensors:
        tensors_by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, tensors_of_dtype in tensors_by_dtype.items():
        dtype_bytes = item_bytes if dtype is None else ITEM_BYTES[dtype]
        # Keep the order of the tensors, although another order could save a bucket.
        bucket_elements = bucket_bytes // dtype_bytes
        yield from consecutive_groups(tensors_of_dtype, attrgetter("elements"), bucket_elements)
