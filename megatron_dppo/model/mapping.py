"""The families' tables, unrolled: every Hugging Face tensor of a model, and every parameter of a Megatron rank.

Loading, saving, the online weight update, the offline converter and the resharding proof all read ``local_parameters``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from megatron_dppo.model.families import family_of
from megatron_dppo.model.layout import Layout, RankCoordinates, local_layers
from megatron_dppo.model.layout_checks import holding_problems, raise_problems
from megatron_dppo.model.rules import Rule, Source
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims, Shard, Split


class Narrowable(Protocol):
    """What a segment cuts: a tensor, of whatever library."""

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """The view of ``length`` indices from ``start`` on along ``dim``."""


T = TypeVar("T", bound=Narrowable)


@dataclass(frozen=True, slots=True)
class Segment:
    """A block copy along ``dim``, every other dimension whole.

    ``local.narrow(dim, local_start, length)`` and ``hf.narrow(dim, hf_start, length)`` hold the same elements.
    """

    hf_name: str
    dim: int
    hf_start: int
    local_start: int
    length: int

    def of_local(self, tensor: T) -> T:
        """The view of the local parameter."""
        view: T = tensor.narrow(self.dim, self.local_start, self.length)
        return view

    def of_hf(self, tensor: T) -> T:
        """The view of the Hugging Face tensor."""
        view: T = tensor.narrow(self.dim, self.hf_start, self.length)
        return view


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of one rank.

    ``chunk``: model chunk on its pipeline stage. ``name``: in that chunk's ``GPTModel.named_parameters()``.
    ``is_primary``: exactly one rank of those that hold the same values has it True; a tied output layer's copy on the
    last stage never has. Elements that no segment covers are padding of the vocabulary, zero.
    """

    chunk: int
    name: str
    shape: Dims
    segments: tuple[Segment, ...]
    is_primary: bool


def hf_tensors(shape: ModelShape) -> dict[str, Dims]:
    """Every tensor of the Hugging Face checkpoint, in model order. Tied embeddings: no ``lm_head.weight``."""
    sizes = shape.sizes()
    return {
        source.name.format(layer=layer, expert=expert): tuple(sizes[d] for d in source.dims)
        for rule, layer, expert in _rules(shape)
        for source in rule.sources
    }


def local_parameters(shape: ModelShape, layout: Layout, rank: int) -> list[LocalParameter]:
    """All parameters of global ``rank``, chunk by chunk. Raises LayoutError where the layout doesn't fit."""
    raise_problems(holding_problems(layout.sizes, shape))
    return list(_parameters(shape, layout, layout.coordinates(rank), primary_only=False))


def primary_parameters(shape: ModelShape, layout: Layout, rank: int) -> list[LocalParameter]:
    """Those of ``local_parameters`` whose ``is_primary`` holds, without making the others."""
    raise_problems(holding_problems(layout.sizes, shape))
    return list(_parameters(shape, layout, layout.coordinates(rank), primary_only=True))


def _rules(shape: ModelShape) -> Iterator[tuple[Rule, int, int]]:
    """``(rule, layer, expert)`` in model order; the numbers mean nothing to rows outside a layer."""
    family = family_of(shape)
    yield family.embedding, 0, 0
    for layer in range(shape.num_layers):
        yield from ((rule, layer, 0) for rule in family.layer)
        yield from (
            (rule, layer, expert) for expert in range(shape.num_experts) for rule in family.expert
        )
    yield family.final_norm, 0, 0
    if not shape.tied_embeddings:
        yield family.output, 0, 0


class _Row(NamedTuple):
    """A table row at one place of one rank. Numbers outside a layer, or outside the experts, are 0."""

    rule: Rule
    is_expert: bool
    is_primary: bool
    layer: int = 0
    local_layer: int = 0
    expert: int = 0
    local_expert: int = 0


def _parameters(
    shape: ModelShape, layout: Layout, at: RankCoordinates, *, primary_only: bool
) -> Iterator[LocalParameter]:
    for chunk in range(layout.chunks):
        for row in _chunk_rows(shape, layout, at, chunk):
            if row.is_primary or not primary_only:
                yield _parameter(shape, layout, at, chunk, row)


def _chunk_rows(
    shape: ModelShape, layout: Layout, at: RankCoordinates, chunk: int
) -> Iterator[_Row]:
    family = family_of(shape)
    is_first = chunk == 0 and at.pp == 0
    is_last = chunk == layout.chunks - 1 and at.pp == layout.pipeline - 1
    experts_here = shape.num_experts // layout.expert

    def dense(rule: Rule, *numbers: int) -> _Row:
        is_primary = at.dp == 0 and at.cp == 0 and (rule.tensor_parallel or at.tp == 0)
        return _Row(rule, False, is_primary, *numbers)

    def routed(rule: Rule, *numbers: int) -> _Row:
        return _Row(rule, True, at.edp == 0 and (rule.tensor_parallel or at.etp == 0), *numbers)

    if is_first:
        yield dense(family.embedding)
    for local_layer, layer in enumerate(local_layers(shape, layout, at.pp, chunk)):
        for rule in family.layer:
            yield dense(rule, layer, local_layer)
        for local_expert in range(experts_here):
            for rule in family.expert:
                expert = at.ep * experts_here + local_expert
                yield routed(rule, layer, local_layer, expert, local_expert)
    if is_last:
        yield dense(family.final_norm)
        if not shape.tied_embeddings:
            yield dense(family.output)
        elif not is_first:
            tied = Rule(family.output.megatron, family.embedding.split, family.embedding.sources)
            yield _Row(tied, is_expert=False, is_primary=False)


def _parameter(
    shape: ModelShape, layout: Layout, at: RankCoordinates, chunk: int, row: _Row
) -> LocalParameter:
    rank, size = (at.etp, layout.expert_tensor) if row.is_expert else (at.tp, layout.tensor)
    shard = shard_of(row.rule.split, row.rule.sources, shape, rank, size)
    names = [source.name.format(layer=row.layer, expert=row.expert) for source in row.rule.sources]
    return LocalParameter(
        chunk=chunk,
        name=row.rule.megatron.format(layer=row.local_layer, expert=row.local_expert),
        shape=shard.shape,
        segments=segments_of(shard, names),
        is_primary=row.is_primary,
    )


def segments_of(shard: Shard, names: Sequence[str]) -> tuple[Segment, ...]:
    """A shard's blocks, their sources by ``names``."""
    return tuple(
        Segment(names[b.source], b.dim, b.source_start, b.local_start, b.length)
        for b in shard.blocks
    )


@lru_cache(maxsize=4096)
def shard_of(
    split: Split, sources: tuple[Source, ...], shape: ModelShape, rank: int, size: int
) -> Shard:
    """What tensor-parallel ``rank`` of ``size`` holds of a row: the same for every layer and expert."""
    sizes = shape.sizes()
    dims = [tuple(sizes[d] for d in source.dims) for source in sources]
    return split(dims, shape, rank, size)
