"""LoRA: the matrices of a model that have an adapter, and each rank's part of every adapter.

An adapter of a Hugging Face matrix W [out, in] is a pair A [rank, in], B [out, rank]; the model computes with
``W + scale * B A``. The families' tables define a rank's part of W. A rank with some rows of W has these rows of B and
all of A; a rank with some columns of W has these columns of A and all of B. So a rank computes its part of the merged
matrix without communication.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from megatron_dppo.model import mapping
from megatron_dppo.model.errors import ModelError
from megatron_dppo.model.families import family_of, layer_counts
from megatron_dppo.model.layout import Layout, RankCoordinates, local_layers
from megatron_dppo.model.rows import Rule, Source
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Block, Dims, replicated

ALL = "all-linear"
ATTENTION, MLP, EXPERTS, HEAD = "attention", "mlp", "experts", "head"
ANY_EXPERT = "*"
"""Placeholder of the expert's number in the name of an adapter that all experts of a layer share."""
CHECKPOINT_PREFIX = "adapters."
_EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")
LORA_A, LORA_B = "lora_A", "lora_B"
CHILD = "adapter"
"""Name of the adapters' module in its Megatron linear."""


class AdapterError(ModelError):
    """Adapters that do not fit the model or the layout."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        rank: Rank of A and B.
        alpha: Numerator of the scale alpha / rank.
        modules: Last names of the adapted matrices, such as ``q_proj``, in the family's order.
        share_experts: Whether all experts of a layer share one adapter. Else each expert has its own.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    share_experts: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def module_groups(shape: ModelShape) -> dict[str, tuple[str, ...]]:
    """Map each group to the last names of its matrices in the family's checkpoints. Empty groups are left out."""
    family = family_of(shape)
    groups: dict[str, list[Rule]] = {ATTENTION: [], MLP: [], EXPERTS: [], HEAD: []}
    for rule in _rules_in_layers(shape):
        if _is_linear(rule):
            groups[_group_of(rule)].append(rule)
    # A family whose experts have biases packs all experts of a layer in one tensor of its files. PEFT has no names for
    # the single matrices of such a tensor, so these experts have no adapters.
    # ``_is_linear`` is False for a bias, which has one dimension, and True for an expert's matrices.
    experts_have_biases = not all(_is_linear(rule) for rule in family.expert)
    if shape.is_moe and not experts_have_biases:
        groups[EXPERTS] += family.expert
    if not shape.tied_embeddings:
        groups[HEAD].append(family.output)
    return {group: _last_names(rules) for group, rules in groups.items() if rules}


def _is_cut_evenly(rule: Rule, index: int, shape: ModelShape, ranks: int) -> bool:
    """Return whether each of ``ranks`` tensor-parallel ranks has an equal part of the rule's source ``index``, or the
    whole source."""
    if rule.split is replicated:
        return True
    sizes = shape.sizes()
    for rank in range(ranks):
        shard = mapping.shard_of(rule.split, rule.sources, shape, rank, ranks)
        length = sum(block.length for block in shard.blocks if block.source == index)
        # All blocks of a shard are cut along one dimension.
        cut_dim = rule.sources[index].dims[shard.blocks[0].dim]
        if length * ranks != sizes[cut_dim]:
            return False
    return True


def _rules_in_layers(shape: ModelShape) -> list[Rule]:
    """Return the rules that at least one layer of the model has, except the experts' rules."""
    return [rule for rule, _ in layer_counts(shape, range(shape.num_layers))]


def _group_of(rule: Rule) -> str:
    if ".self_attention." in rule.megatron:
        return ATTENTION
    # The matrices of a shared expert and of an expert have the same last names, so both are in one group.
    if ".shared_experts." in rule.megatron:
        return EXPERTS
    return MLP


def _last_names(rules: Sequence[Rule]) -> tuple[str, ...]:
    names: list[str] = []
    for rule in rules:
        names += [_last_name(source) for source in rule.sources]
    return tuple(dict.fromkeys(names))


def resolve_modules(names: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Return the matrices that ``names`` select, in the family's order.

    A name is a matrix, a group of matrices, or ALL. Raises AdapterError with the names that this model does not have.
    """
    groups = module_groups(shape)
    all_names = tuple(dict.fromkeys(chain(*groups.values())))
    # ALL excludes the output layer, as in PEFT; an adapter of the output layer must be requested by name.
    linear_names = tuple(name for name in all_names if name not in groups.get(HEAD, ()))
    meanings = {ALL: linear_names, **groups, **{name: (name,) for name in all_names}}
    unknown_names = [name for name in names if name not in meanings]
    if unknown_names or not names:
        raise AdapterError(
            f"got {unknown_names or list(names)}, which name nothing in a {shape.family} model, expected "
            f"some of {[ALL, *groups, *all_names]}"
        )
    requested_modules: set[str] = set()
    for name in names:
        requested_modules.update(meanings[name])
    return tuple(module for module in all_names if module in requested_modules)


def adapter_faults(adapters: Adapters, shape: ModelShape, layout: Layout) -> Iterator[str]:
    """Yield the errors in ``adapters``.

    The adapters' rank must not exceed a dimension of an adapted matrix, and tensor-parallel ranks must have equal parts
    of each adapted matrix.
    """
    family = family_of(shape)
    sizes = shape.sizes()
    expert_rules = family.expert if shape.is_moe else ()
    for rule in (*_rules_in_layers(shape), *expert_rules, *_outputs(shape)):
        ranks = layout.expert_tensor if rule in family.expert else layout.tensor
        for index, source in _adapted_sources(adapters, rule):
            dims = [sizes[d] for d in source.dims]
            if adapters.rank > min(dims):
                yield f"rank {adapters.rank} is over the {min(dims)} of {_last_name(source)} {dims[0]} x {dims[1]}"
            if not _is_cut_evenly(rule, index, shape, ranks):
                # The ranks of a group multiply tensors of the same shape, and reduce gradients over the group.
                yield (
                    f"{_last_name(source)} is not cut evenly over {ranks} tensor-parallel ranks, "
                    "expected every rank to hold as much of it"
                )


class IndexRange(NamedTuple):
    """Neighbouring indices of a matrix along an axis: ``length`` of them from ``start`` on."""

    start: int
    length: int


def ranges_of(blocks: Sequence[Block]) -> tuple[IndexRange, ...]:
    """Return the source's indices that ``blocks`` have, in ascending order; neighbouring blocks are one range."""
    ranges: list[IndexRange] = []
    for block in sorted(blocks, key=attrgetter("source_start")):
        if ranges and ranges[-1].start + ranges[-1].length == block.source_start:
            ranges[-1] = IndexRange(ranges[-1].start, ranges[-1].length + block.length)
        else:
            ranges.append(IndexRange(block.source_start, block.length))
    return tuple(ranges)


@dataclass(frozen=True)
class AdapterPart:
    """The adapter of one Hugging Face matrix in a rank's Megatron linear.

    Attributes:
        name: Last name of the matrix.
        module: Full name of the matrix, with ``{expert}`` for an expert's number.
        dims: (out, in) of the whole matrix.
        axis: The axis along which ranks cut the matrix: 0, B's rows; 1, A's columns.
        ranges: This rank's share along the axis. Only a delta net's matrix of queries, keys and values has several
            ranges.
        blocks: The matrix's blocks in the rank's fused parameter.
        is_whole: Whether every tensor-parallel rank holds the whole matrix. Then no rank cuts A or B.
    """

    name: str
    module: str
    dims: Dims
    axis: int
    ranges: tuple[IndexRange, ...]
    blocks: tuple[Block, ...]
    is_whole: bool = False

    @property
    def length(self) -> int:
        """Number of indices of this rank's share along the axis."""
        return sum(indices.length for indices in self.ranges)

    def local_start(self, block: Block) -> int:
        """Return where the indices of ``block`` begin in this rank's share. The share is all ``ranges``, one after the
        other."""
        start = 0
        for indices in self.ranges:
            offset = block.source_start - indices.start
            if 0 <= offset < indices.length:
                return start + offset
            start += indices.length
        raise AdapterError(f"{self.module}: no part of this rank begins at {block.source_start}")

    def whole_dims(self, which: str, adapter_rank: int) -> Dims:
        """Return the dimensions of A or B in the whole model. ``which``: LORA_A or LORA_B."""
        if which == LORA_A:
            return (adapter_rank, self.dims[1])
        return (self.dims[0], adapter_rank)

    def local_dims(self, which: str, adapter_rank: int) -> Dims:
        """Return the dimensions of A or B on this rank of the layout."""
        dims = list(self.whole_dims(which, adapter_rank))
        if self.is_cut(which):
            dims[self.axis] = self.length
        return tuple(dims)

    def is_cut(self, which: str) -> bool:
        """Return whether tensor-parallel ranks hold different columns of A, or different rows of B."""
        cut_matrix = LORA_B if self.axis == 0 else LORA_A
        return not self.is_whole and which == cut_matrix


@dataclass(frozen=True)
class AdaptedLinear:
    """A Megatron linear with adapters, on one rank.

    Attributes:
        chunk: Number of the model chunk.
        path: Path of the module in its chunk.
        layer: Number of the layer in the whole model, from 0. The number of the output layer is ``num_layers``.
        parts: The adapters of its matrices.
        rows: Rows of the rank's fused parameter.
        of_experts: Whether the linear belongs to experts.
        experts: Numbers of the experts on this rank if each expert has separate adapters. Empty: the linear has one set
            of adapters.
    """

    chunk: int
    path: str
    layer: int
    parts: tuple[AdapterPart, ...]
    rows: int
    of_experts: bool = False
    experts: tuple[int, ...] = ()

    @cached_property
    def axis(self) -> int:
        """The axis along which tensor-parallel ranks cut the linear: 0 its outputs, 1 its inputs."""
        return self.parts[0].axis

    @property
    def is_shared_by_experts(self) -> bool:
        """Whether all experts use one set of adapters."""
        return self.of_experts and not self.experts

    @property
    def is_whole(self) -> bool:
        """Whether every tensor-parallel rank computes the whole linear."""
        return self.parts[0].is_whole


def adapted_linears(
    adapters: Adapters, shape: ModelShape, layout: Layout, rank: int
) -> list[AdaptedLinear]:
    """Return all linears with adapters of global ``rank``, in model order."""
    coordinates = layout.coordinates(rank)
    family = family_of(shape)
    linears = []
    for chunk in range(layout.chunks):
        for local_layer, layer in enumerate(local_layers(shape, layout, coordinates.pp, chunk)):
            position = chunk, local_layer, layer
            rules = (*family.rules_of(shape, layer), *family.expert_rules_of(shape, layer))
            for rule in rules:
                if _adapted_sources(adapters, rule):
                    linears.append(_linear(adapters, shape, layout, coordinates, rule, position))
    is_last_stage = coordinates.pp == layout.pipeline - 1
    if not is_last_stage:
        return linears
    # The output layer has no local number. The 0 is not used.
    position = layout.chunks - 1, 0, shape.num_layers
    for rule in _outputs(shape):
        if _adapted_sources(adapters, rule):
            linears.append(_linear(adapters, shape, layout, coordinates, rule, position))
    return linears


def adapter_tensors(adapters: Adapters, shape: ModelShape) -> dict[str, Dims]:
    """Return the dimensions of every A and B of the whole model, in model order.

    An example of a name: ``model.layers.0.self_attn.q_proj.lora_A``.
    """
    tensors: dict[str, Dims] = {}
    for linear in adapted_linears(adapters, shape, Layout(), 0):
        for expert in linear.experts or (None,):
            for part in linear.parts:
                for which in (LORA_A, LORA_B):
                    name = f"{_module(part, expert)}.{which}"
                    tensors[name] = part.whole_dims(which, adapters.rank)
    return tensors


def trained_elements(shape: ModelShape, adapters: Adapters | None, *, routers: bool) -> int:
    """Return the number of elements that a run trains and saves.

    Without ``adapters`` a run trains the whole model. Otherwise it trains the adapters and, with ``routers``, the
    routers.
    """
    if adapters is None:
        return mapping.parameter_count(shape)
    elements = sum(map(math.prod, adapter_tensors(adapters, shape).values()))
    if routers:
        elements += len(shape.moe_layers) * shape.num_experts * shape.hidden_size
    return elements


def checkpoint_key(name: str) -> tuple[str, int | None]:
    """Return the key of an adapter's tensor in a training checkpoint, and the index of its expert.

    ``name`` is a name of ``adapter_tensors``. A checkpoint stacks the tensors of a layer's experts along the first
    axis. The index is the expert's position in this axis; None for a tensor outside of experts.
    """
    expert = _EXPERT_NUMBER.search(name)
    if expert is None:
        return f"{CHECKPOINT_PREFIX}{name}", None
    stacked = name[: expert.start(1)] + ANY_EXPERT + name[expert.end(1) :]
    return f"{CHECKPOINT_PREFIX}{stacked}", int(expert[1])


def adapter_parameters(
    adapters: Adapters, shape: ModelShape, layout: Layout, rank: int
) -> Iterator[mapping.LocalParameter]:
    """Yield the part that ``rank`` holds of every A and B of ``adapter_tensors``.

    The names are paths of Megatron's modules. An expert's A and B are slices of a stacked tensor: ``...lora_A.3``.
    """
    coordinates = layout.coordinates(rank)
    for linear in adapted_linears(adapters, shape, layout, rank):
        for local_expert, expert in enumerate(linear.experts or (None,)):
            suffix = "" if expert is None else f".{local_expert}"
            for part in linear.parts:
                for which in (LORA_A, LORA_B):
                    yield _parameter(adapters, linear, part, which, coordinates, expert, suffix)


def _parameter(
    adapters: Adapters,
    linear: AdaptedLinear,
    part: AdapterPart,
    which: str,
    coordinates: RankCoordinates,
    expert: int | None,
    suffix: str,
) -> mapping.LocalParameter:
    # Every rank of the stage holds the whole adapter that experts share, and uses its own rows or columns.
    is_cut = part.is_cut(which) and not linear.is_shared_by_experts
    if is_cut:
        dims = part.local_dims(which, adapters.rank)
        axis = part.axis
        ranges = part.ranges
    else:
        dims = part.whole_dims(which, adapters.rank)
        axis = 0
        ranges = (IndexRange(0, dims[0]),)
    segments = []
    local_start = 0
    for indices in ranges:
        name = f"{_module(part, expert)}.{which}"
        segments.append(mapping.Segment(name, axis, indices.start, local_start, indices.length))
        local_start += indices.length
    if linear.experts:
        is_first_copy = coordinates.edp == 0
        tensor_rank = coordinates.etp
    else:
        is_first_copy = coordinates.dp == coordinates.cp == 0
        tensor_rank = coordinates.tp
    return mapping.LocalParameter(
        chunk=linear.chunk,
        name=f"{linear.path}.{CHILD}.{part.name}.{which}{suffix}",
        shape=dims,
        segments=tuple(segments),
        is_primary=is_first_copy and (is_cut or tensor_rank == 0),
    )


def _linear(
    adapters: Adapters,
    shape: ModelShape,
    layout: Layout,
    coordinates: RankCoordinates,
    rule: Rule,
    position: tuple[int, int, int],
) -> AdaptedLinear:
    chunk, local_layer, layer = position
    of_experts = rule in family_of(shape).expert
    rank, ranks = coordinates.tp, layout.tensor
    if of_experts:
        rank, ranks = coordinates.etp, layout.expert_tensor
    shard = mapping.shard_of(rule.split, rule.sources, shape, rank, ranks)
    sizes = shape.sizes()
    parts = []
    for index, source in _adapted_sources(adapters, rule):
        blocks = tuple(b for b in shard.blocks if b.source == index)
        parts.append(
            AdapterPart(
                name=_last_name(source),
                module=source.name.removesuffix(".weight").replace("{layer}", str(layer)),
                dims=tuple(sizes[d] for d in source.dims),
                axis=blocks[0].dim,
                ranges=ranges_of(blocks),
                blocks=blocks,
                is_whole=rule.split is replicated,
            )
        )
    experts: tuple[int, ...] = ()
    if of_experts and not adapters.share_experts:
        experts = tuple(mapping.experts_of(shape, coordinates.ep, layout.expert))
    return AdaptedLinear(
        chunk=chunk,
        path=rule.megatron.format(layer=local_layer, expert="").rpartition(".")[0],
        layer=layer,
        parts=tuple(parts),
        rows=shard.shape[0],
        of_experts=of_experts,
        experts=experts,
    )


def _outputs(shape: ModelShape) -> tuple[Rule, ...]:
    """Return the rule of the output layer, unless it is tied to the embedding."""
    if shape.tied_embeddings:
        return ()
    return (family_of(shape).output,)


def _module(part: AdapterPart, expert: int | None) -> str:
    return part.module.format(expert=ANY_EXPERT if expert is None else expert)


def _is_linear(rule: Rule) -> bool:
    """Return whether adapters exist for the rule's matrices.

    Adapters exist for matrices in Megatron linears. All matrices that are cut are in linears. A replicated matrix is in
    a linear only if its name says so: the matrices to latents are, a router and a shared expert's gate are not.
    """
    is_in_linear = rule.split is not replicated or ".linear_" in rule.megatron
    return is_in_linear and all(len(s.dims) == 2 for s in rule.sources)


def _adapted_sources(adapters: Adapters, rule: Rule) -> list[tuple[int, Source]]:
    """Return the rule's sources that have adapters, with their numbers in the rule."""
    if not _is_linear(rule):
        return []
    return [(i, s) for i, s in enumerate(rule.sources) if _last_name(s) in adapters.modules]


def _last_name(source: Source) -> str:
    return source.name.removesuffix(".weight").rpartition(".")[2]
