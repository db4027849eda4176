"""The parameters that the families' tables define: every Hugging Face tensor of a model, every parameter of a Megatron
rank, and every parameter of a rank of an SGLang engine.

Loading, saving, the online weight update, the offline converter and the resharding proof all read ``local_parameters``;
the proof and the checksums of a weight update read ``engine_parameters``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megatron_dppo.model.engine_layout import EngineLayout, check_engine_layout
from megatron_dppo.model.families import family_of
from megatron_dppo.model.layout import (
    Layout,
    RankCoordinates,
    holding_faults,
    local_layers,
    raise_faults,
)
from megatron_dppo.model.rows import EngineRow, Rule, Source
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims, Shard, Split, replicated


class Narrowable(Protocol):
    """A tensor of any library that can return views of its parts."""

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Return the view of ``length`` indices from ``start`` on along ``dim``."""

    def __getitem__(self, index: Any) -> Any:
        """Return the view of the indices in ``index``."""


T = TypeVar("T", bound=Narrowable)


def stepped(tensor: T, dim: int, start: int, length: int, step: int) -> T:
    """Return the view of ``length`` indices of ``tensor`` along ``dim``: every ``step``-th from ``start`` on."""
    view: T = tensor.narrow(dim, start, (length - 1) * step + 1)
    if step == 1:
        return view
    index = (*(slice(None) for _ in range(dim)), slice(None, None, step))
    strided: T = view[index]
    return strided


ATTENTION_MODULES = (".self_attn.", ".linear_attn.")
"""If a tensor of SGLang has one of these parts in its name, an attention replica divides it among the replica's ranks.
"""

RowT = TypeVar("RowT", Rule, EngineRow)


@dataclass(frozen=True, slots=True)
class Segment:
    """A block copy along ``dim``. The block covers all other dimensions.

    ``local.narrow(dim, local_start, length)`` and ``hf.narrow(dim, hf_start, length)`` hold the same elements. With
    ``hf_step`` n the block has every n-th index of the Hugging Face tensor, from ``hf_start`` on.
    """

    hf_name: str
    dim: int
    hf_start: int
    local_start: int
    length: int
    hf_step: int = 1

    @property
    def hf_end(self) -> int:
        """The index in the Hugging Face tensor after the block's last index."""
        return self.hf_start + (self.length - 1) * self.hf_step + 1

    def within(self, start: int, count: int) -> tuple[int, int]:
        """Return the part of the block that lies in ``start .. start + count`` of the Hugging Face tensor.

        The result is the part's first index in the block, and the part's number of indices. This number is 0 or
        negative if the part is empty.
        """
        step = self.hf_step
        # Index i of the block is index hf_start + i * step of the tensor. So i lies in the part if i is at least
        # (start - hf_start) / step, and below (start + count - hf_start) / step. ``-(-a // b)`` is a / b, rounded up.
        first = max(0, -(-(start - self.hf_start) // step))
        end = min(self.length, -(-(start + count - self.hf_start) // step))
        return first, end - first

    def of_local(self, tensor: T) -> T:
        """Return the segment's view of the local parameter ``tensor``."""
        view: T = tensor.narrow(self.dim, self.local_start, self.length)
        return view

    def of_hf(self, tensor: T) -> T:
        """Return the segment's view of the Hugging Face tensor ``tensor``."""
        return stepped(tensor, self.dim, self.hf_start, self.length, self.hf_step)


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter of one rank of the trainer or the engine.

    Attributes:
        chunk: Number of the model chunk on its pipeline stage.
        name: Name in that chunk's ``GPTModel.named_parameters()``; for an engine, SGLang's name.
        shape: Local shape.
        segments: Blocks of Hugging Face tensors that fill the parameter. Elements outside of segments are zero: padding
            of the vocabulary, or a bias that only an engine's first rank adds.
        is_primary: True on exactly one of the ranks that hold the same values, and never for the copy of a tied
            embedding on the last stage.
        holders: Trainer ranks that hold the same values, in order. A primary parameter's first holder is its own rank.
    """

    chunk: int
    name: str
    shape: Dims
    segments: tuple[Segment, ...]
    is_primary: bool
    holders: range = range(0)


@dataclass(frozen=True, slots=True)
class EngineParameter(LocalParameter):
    """A tensor of one rank of the engine.

    Attributes:
        dtype: The tensor's own type; None: the model's type.
        adds_one: Whether the tensor holds 1 + its source.
    """

    dtype: str | None = None
    adds_one: bool = False


def hf_tensors(shape: ModelShape) -> dict[str, Dims]:
    """Return the shape of every tensor of the Hugging Face checkpoint, in model order.

    A model with tied embeddings has no ``lm_head.weight``.
    """
    sizes = shape.sizes()
    tensors: dict[str, Dims] = {}
    for name, source in _hf_sources(shape):
        tensors[name] = tuple(sizes[dim] for dim in source.dims)
    return tensors


def _hf_sources(shape: ModelShape) -> Iterator[tuple[str, Source]]:
    """Yield the name of each tensor of the Hugging Face checkpoint and its source in the family's rows."""
    # A single rank has all parameters.
    whole_model = Layout()
    for row in _chunk_rows(shape, whole_model, whole_model.coordinates(0), chunk=0):
        for source in row.rule.sources:
            yield source.name.format(layer=row.layer, expert=row.expert), source


def carried_names(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return, sorted, the tensors in ``names`` that are no part of the model but are carried along in checkpoints."""
    model_tensors = hf_tensors(shape)
    carries = family_of(shape).carries
    return sorted(name for name in names if name not in model_tensors and carries(shape, name))


@cache
def own_dtypes(shape: ModelShape) -> dict[str, str]:
    """Return name -> type for the Hugging Face tensors that have a fixed type in the trainer and in updates."""
    return {name: source.dtype for name, source in _hf_sources(shape) if source.dtype is not None}


@cache
def file_dtypes(shape: ModelShape) -> dict[str, str]:
    """Return the second type that a Hugging Face tensor may have in checkpoint files besides the model's type, by the
    tensor's name. Tensors without a second type are left out."""
    dtypes: dict[str, str] = {}
    for name, source in _hf_sources(shape):
        if source.file_dtype is not None:
            dtypes[name] = source.file_dtype
    return dtypes


class PackedName(NamedTuple):
    """The name of a tensor in files that has all experts of a layer, and whether its matrices are transposed."""

    name: str
    is_transposed: bool


@cache
def packed_names(shape: ModelShape) -> dict[str, PackedName]:
    """Map the name of each expert's matrix to the packed tensor that contains the matrix in files.

    The result is empty if the family has no packed tensors.
    """
    names: dict[str, PackedName] = {}
    for layer in shape.moe_layers:
        for packed in family_of(shape).packed:
            whole = PackedName(packed.name.format(layer=layer), packed.is_transposed)
            for expert in range(shape.num_experts):
                for matrix in packed.matrices:
                    names[matrix.format(layer=layer, expert=expert)] = whole
    return names


@cache
def parameter_count(shape: ModelShape) -> int:
    """Return the number of elements of the whole model. Tied embeddings count once."""
    return sum(math.prod(dims) for dims in hf_tensors(shape).values())


def local_parameters(shape: ModelShape, layout: Layout, rank: int) -> list[LocalParameter]:
    """Return all parameters of global ``rank``, chunk by chunk. Raises LayoutError if the layout does not fit."""
    return list(_trainer_parameters(shape, layout, rank, primary_only=False))


def primary_parameters(shape: ModelShape, layout: Layout, rank: int) -> list[LocalParameter]:
    """Return the parameters of ``local_parameters`` with ``is_primary``. Build no other parameters."""
    return list(_trainer_parameters(shape, layout, rank, primary_only=True))


def dividing_ranks(shape: ModelShape, engine: EngineLayout, row: EngineRow) -> int:
    """Return the number of ranks among which the engine divides the tensor of ``row``, a row outside of experts."""
    embedding, output = family_of(shape).vocabulary_tensors
    if row.name == output:
        is_per_replica = engine.output_per_replica
    else:
        is_per_replica = row.name == embedding or any(m in row.name for m in ATTENTION_MODULES)
    return engine.attention_tensor if is_per_replica else engine.tensor


def engine_parameters(shape: ModelShape, engine: EngineLayout, rank: int) -> list[EngineParameter]:
    """Return all tensors of engine ``rank``. Names are SGLang's; a local expert's slice is ``...w13_weight[i]``.

    ``is_primary`` marks the first copy of a tensor that several ranks hold. Raises LayoutError.
    """
    check_engine_layout(shape, engine)
    ep_rank, etp_rank = divmod(rank, engine.expert_tensor)
    parameters = []
    for row in _engine_rows(shape, engine, ep_rank):
        engine_row = row.rule
        # Of a replicated tensor, rank 0 has the first copy.
        is_first_copy = engine_row.split is not replicated or rank == 0
        # ``part``: a rank, and the number of ranks among which the tensor is divided.
        if row.is_expert:
            part = (etp_rank, engine.expert_tensor)
        else:
            ranks = dividing_ranks(shape, engine, engine_row)
            part = (rank % ranks, ranks)
            # The first ``ranks`` ranks have the first copy of each part. All later ranks have further copies.
            is_first_copy = is_first_copy and rank < ranks
        shard = shard_of(engine_row.split, engine_row.sources, shape, *part)
        parameters.append(
            EngineParameter(
                chunk=0,
                name=engine_row.name.format(layer=row.layer, expert=row.local_expert),
                shape=shard.shape,
                segments=_segments(shard, row),
                is_primary=is_first_copy,
                dtype=engine_row.dtype_in(shape),
                adds_one=engine_row.adds_one,
            )
        )
    return parameters


def keeps_untied_output(shape: ModelShape) -> bool:
    """Return whether the engine holds a tied model's embedding a second time, as its output matrix."""
    return shape.tied_embeddings and family_of(shape).engine_keeps_output


def engine_inputs(shape: ModelShape, hf_name: str) -> list[str]:
    """Return the names under which the engine must receive the tensor ``hf_name``."""
    embedding, output = family_of(shape).vocabulary_tensors
    is_also_output = hf_name == embedding and keeps_untied_output(shape)
    if is_also_output:
        return [embedding, output]
    return [hf_name]


def experts_of(shape: ModelShape, rank: int, ranks: int) -> range:
    """Return the numbers of the experts that expert-parallel ``rank`` of ``ranks`` holds."""
    count = shape.num_experts // ranks
    return range(rank * count, (rank + 1) * count)


@lru_cache(maxsize=4096)
def shard_of(
    split: Split, sources: tuple[Source, ...], shape: ModelShape, rank: int, size: int
) -> Shard:
    """Return the part of a table row on tensor-parallel ``rank`` of ``size``. All layers and experts have equal
    parts."""
    sizes = shape.sizes()
    dims = [tuple(sizes[d] for d in source.dims) for source in sources]
    return split(dims, shape, rank, size)


class _MappingRow(NamedTuple, Generic[RowT]):
    """A table row for one layer and expert. The numbers are 0 in rows outside of layers or outside of experts."""

    rule: RowT
    is_expert: bool = False
    is_tied_copy: bool = False
    layer: int = 0
    local_layer: int = 0
    expert: int = 0
    local_expert: int = 0


def _layer_rows(shape: ModelShape, layers: range, experts: range) -> Iterator[_MappingRow[Rule]]:
    family = family_of(shape)
    for local_layer, layer in enumerate(layers):
        for rule in family.rules_of(shape, layer):
            yield _MappingRow(rule, layer=layer, local_layer=local_layer)
        expert_rules = family.expert_rules_of(shape, layer)
        for local_expert, expert in enumerate(experts):
            for rule in expert_rules:
                yield _MappingRow(
                    rule,
                    is_expert=True,
                    layer=layer,
                    local_layer=local_layer,
                    expert=expert,
                    local_expert=local_expert,
                )


def _chunk_rows(
    shape: ModelShape, layout: Layout, coordinates: RankCoordinates, chunk: int
) -> Iterator[_MappingRow[Rule]]:
    family = family_of(shape)
    is_first = chunk == 0 and coordinates.pp == 0
    is_last = chunk == layout.chunks - 1 and coordinates.pp == layout.pipeline - 1
    if is_first:
        yield _MappingRow(family.embedding)
    layers = local_layers(shape, layout, coordinates.pp, chunk)
    yield from _layer_rows(shape, layers, experts_of(shape, coordinates.ep, layout.expert))
    if is_last:
        yield _MappingRow(family.final_norm)
        if not shape.tied_embeddings:
            yield _MappingRow(family.output)
        elif not is_first:
            # The last stage holds a copy of the embedding. The first stage saves and sends it.
            tied = replace(family.embedding, megatron=family.output.megatron)
            yield _MappingRow(tied, is_tied_copy=True)


def _engine_rows(
    shape: ModelShape, engine: EngineLayout, ep_rank: int
) -> Iterator[_MappingRow[EngineRow]]:
    family = family_of(shape)
    experts = experts_of(shape, ep_rank, engine.expert)
    yield from map(_MappingRow, family.embedding.in_engine)
    for layer in range(shape.num_layers):
        for row in family.engine_rows_of(shape, layer):
            yield _MappingRow(row, layer=layer)
        expert_rows = family.engine_expert_rows_of(shape, layer)
        for local_expert, expert in enumerate(experts):
            for row in expert_rows:
                yield _MappingRow(
                    row, is_expert=True, layer=layer, expert=expert, local_expert=local_expert
                )
    yield from map(_MappingRow, family.final_norm.in_engine)
    if not shape.tied_embeddings:
        yield from map(_MappingRow, family.output.in_engine)
    elif family.engine_keeps_output:
        for row in family.output.in_engine:
            yield _MappingRow(replace(row, sources=family.embedding.sources))


def _trainer_parameters(
    shape: ModelShape, layout: Layout, rank: int, *, primary_only: bool
) -> Iterator[LocalParameter]:
    raise_faults(holding_faults(layout.sizes, shape))
    coordinates = layout.coordinates(rank)
    stage_start = coordinates.pp * layout.stage_ranks
    stage_end = stage_start + layout.stage_ranks
    # Experts are replicated over edp, all other parameters over dp and cp; the first replica is the primary holder.
    for chunk in range(layout.chunks):
        for row in _chunk_rows(shape, layout, coordinates, chunk):
            rule = row.rule
            if row.is_expert:
                part = (coordinates.etp, layout.expert_tensor)
                first_holder = stage_start + coordinates.ep * layout.expert_tensor
                holders_step = layout.expert * layout.expert_tensor
            else:
                part = (coordinates.tp, layout.tensor)
                first_holder = stage_start
                # All ranks of the stage hold a parameter that is not divided.
                holders_step = layout.tensor if rule.tensor_parallel else 1
            if rule.tensor_parallel:
                first_holder += part[0]
            holders = range(first_holder, stage_end, holders_step)
            is_primary = rank == first_holder and not row.is_tied_copy
            if is_primary or not primary_only:
                yield _parameter(shape, row, part, chunk, is_primary, holders)


def _parameter(
    shape: ModelShape,
    row: _MappingRow[Rule],
    part: tuple[int, int],
    chunk: int,
    is_primary: bool,
    holders: range,
) -> LocalParameter:
    """Build a parameter. ``part`` is the tensor-parallel rank and the number of these ranks."""
    shard = shard_of(row.rule.split, row.rule.sources, shape, *part)
    return LocalParameter(
        chunk=chunk,
        name=row.rule.megatron.format(layer=row.local_layer, expert=row.local_expert),
        shape=shard.shape,
        segments=_segments(shard, row),
        is_primary=is_primary,
        holders=holders,
    )


def _segments(shard: Shard, row: _MappingRow[Any]) -> tuple[Segment, ...]:
    names = [source.name.format(layer=row.layer, expert=row.expert) for source in row.rule.sources]
    return tuple(
        Segment(names[b.source], b.dim, b.source_start, b.local_start, b.length, b.source_step)
        for b in shard.blocks
    )
