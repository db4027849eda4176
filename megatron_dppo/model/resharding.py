"""The proof that a weight update from any trainer layout into any engine layout moves every element exactly once.

The proof needs only shapes. It shows that the trainer's primary shards tile every Hugging Face tensor, and that the
blocks on the engine's ranks tile every tensor as often as the engine holds it. A tensor's pieces are blocks along one
dimension, so they tile the tensor if their sorted intervals cover 0 to its length without gap or overlap. The report
has the number of bytes that move, and the lower bound of this number.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from rich.console import Console
from rich.table import Column, Table

from megatron_dppo.model import mapping
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import TensorSources, gather_plan
from megatron_dppo.model.layout import Layout, local_layers
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims


def check_sources(tensor: TensorSources) -> None:
    """Check that the pieces of one tensor tile it. Raises ProofError."""
    check_tiling(tensor.name, tensor.shape, [p.segment for p in tensor.pieces])
    for piece in tensor.pieces:
        expected_shape = list(tensor.shape)
        expected_shape[piece.segment.dim] = piece.segment.length
        if list(piece.shape) != expected_shape:
            raise ProofError(
                f"{tensor.name}: rank {piece.rank}'s {piece.name} provides a block of {piece.shape}, "
                f"expected {tuple(expected_shape)}"
            )


def prove_rank_filled(shape: ModelShape, layout: Layout, rank: int) -> None:
    """Check that every element of every parameter of ``rank``, except padding, comes from one Hugging Face element."""
    tensors = mapping.hf_tensors(shape)
    vocabulary = family_of(shape).vocabulary_tensors
    for parameter in mapping.local_parameters(shape, layout, rank):
        check_filled(f"rank {rank}: {parameter.name}", parameter, tensors, vocabulary)


def check_filled(
    location: str,
    parameter: mapping.LocalParameter,
    tensors: Mapping[str, Dims],
    vocabulary: Collection[str],
) -> None:
    """Check that the segments tile ``parameter`` and are inside their sources.

    ``tensors``: the shapes of the sources. A parameter may end in padding only if it has no segments, or if a segment
    comes from a tensor of ``vocabulary``.
    """
    may_have_padding = True
    dim = 0
    if parameter.segments:
        may_have_padding = any(s.hf_name in vocabulary for s in parameter.segments)
        dim = parameter.segments[0].dim
    for s in parameter.segments:
        source = tensors[s.hf_name]
        other_dims = list(source)
        local_other_dims = list(parameter.shape)
        del other_dims[s.dim], local_other_dims[s.dim]
        if s.hf_end > source[s.dim] or other_dims != local_other_dims:
            raise ProofError(
                f"{location}: segment {s} does not fit {s.hf_name} of shape {tuple(source)}"
            )
    intervals = sorted((s.local_start, s.length) for s in parameter.segments)
    end = _end_of_intervals(location, intervals)
    if any(s.dim != dim for s in parameter.segments):
        raise ProofError(f"{location}: segments along different dimensions")
    if end != parameter.shape[dim] and not may_have_padding:
        raise ProofError(
            f"{location}: filled up to {end} of {parameter.shape[dim]} along dim {dim}"
        )


def check_tiling(name: str, dims: Dims, segments: Iterable[mapping.Segment]) -> None:
    """Check that ``segments`` cover a tensor of shape ``dims`` exactly once. Raises ProofError.

    All segments must have the same step n. For each remainder r, the segments that start at r modulo n must cover the
    indices r, r + n, r + 2n and so on.
    """
    segments = list(segments)
    axes = {s.dim for s in segments}
    if len(axes) != 1:
        raise ProofError(f"{name}: provided along dimensions {sorted(axes)}, expected one")
    (dim,) = axes
    steps = {s.hf_step for s in segments}
    if len(steps) != 1:
        raise ProofError(f"{name}: provided with the steps {sorted(steps)}, expected one")
    (step,) = steps
    for remainder in range(step):
        intervals = [
            (s.hf_start // step, s.length) for s in segments if s.hf_start % step == remainder
        ]
        # Place i of an interval is index i * step + remainder. The dimension is a multiple of the step, so each
        # remainder has dims[dim] / step places.
        end = _end_of_intervals(name, sorted(intervals)) * step
        if end != dims[dim]:
            raise ProofError(f"{name}: covered up to {end} of {dims[dim]} along dim {dim}")


def _end_of_intervals(location: str, intervals: list[tuple[int, int]]) -> int:
    """Return the end of the intervals ``(start, length)``. Raises ProofError unless they begin at 0, without gap or
    overlap."""
    end = 0
    for start, length in intervals:
        if start != end or length < 1:
            times = "twice" if start < end else "never"
            raise ProofError(f"{location}: index {min(start, end)} is provided {times}")
        end = start + length
    return end


_Landing = tuple[int, str, mapping.Segment]
"""An engine rank, the name of one of its parameters, and a block that the parameter receives."""


@dataclass(frozen=True)
class ReshardingReport:
    """Bytes of one weight update, by rank.

    Attributes:
        model_bytes: Bytes of the model.
        holds: For each trainer rank, the bytes of the weights that it must provide as their primary holder. Every
            weight must be sent once, so the sum over ranks, ``model_bytes``, is the lower bound of the bytes sent.
        direct: For each trainer rank, the bytes that it would send if every engine rank received only its own blocks.
        engine: For each engine rank, the bytes that it holds: the lower bound of the bytes that it receives.
    """

    model_bytes: int
    holds: tuple[int, ...]
    direct: tuple[int, ...]
    engine: tuple[int, ...]


def prove_resharding(
    shape: ModelShape, layout: Layout, engine: EngineLayout, item_bytes: int = 2
) -> ReshardingReport:
    """Prove the resharding, and count its bytes (``item_bytes`` for each element). Raises ProofError, LayoutError."""
    plan = gather_plan(shape, layout)
    for tensor in plan:
        check_sources(tensor)
    landings_by_tensor = _engine_segments(shape, engine)
    holds = Counter[int]()
    direct = Counter[int]()
    received = Counter[int]()
    for tensor in plan:
        landings = landings_by_tensor[tensor.name]
        _check_copies(tensor, landings)
        for piece in tensor.pieces:
            holds[piece.rank] += piece.elements
            for *_, segment in landings:
                direct[piece.rank] += _overlap(tensor.shape, piece.segment, segment)
        for rank, _, segment in landings:
            # The overlap of a block with itself is the whole block.
            received[rank] += _overlap(tensor.shape, segment, segment)
    if direct.total() != received.total():
        raise ProofError(
            f"trainer ranks would send {direct.total()} elements, the engine receives {received.total()}"
        )

    def bytes_by_rank(elements: Counter[int], ranks: int) -> tuple[int, ...]:
        return tuple(elements[rank] * item_bytes for rank in range(ranks))

    return ReshardingReport(
        model_bytes=holds.total() * item_bytes,
        holds=bytes_by_rank(holds, layout.world_size),
        direct=bytes_by_rank(direct, layout.world_size),
        engine=bytes_by_rank(received, engine.tensor),
    )


# Callers prove many trainer layouts against the same engine, so cache the engine's part.
@lru_cache(maxsize=1)
def _engine_segments(shape: ModelShape, engine: EngineLayout) -> Mapping[str, list[_Landing]]:
    """Return the blocks of each Hugging Face tensor on engine ranks, and prove that every rank is filled."""
    tensors = mapping.hf_tensors(shape)
    vocabulary = family_of(shape).vocabulary_tensors
    landings: dict[str, list[_Landing]] = defaultdict(list)
    for rank in range(engine.tensor):
        for parameter in mapping.engine_parameters(shape, engine, rank):
            check_filled(f"engine rank {rank}: {parameter.name}", parameter, tensors, vocabulary)
            for segment in parameter.segments:
                landings[segment.hf_name].append((rank, parameter.name, segment))
    return landings


def _check_copies(tensor: TensorSources, landings: list[_Landing]) -> None:
    """Check that the blocks cover every element equally often, and that no parameter holds a block twice."""
    if not landings:
        raise ProofError(f"{tensor.name}: no engine rank receives it")
    # Several ranks may hold copies of a block (replicas, shared K/V heads). Copies have equal intervals, so count the
    # equal intervals.
    copies = Counter[tuple[int, ...]]()
    blocks: dict[tuple[int, ...], mapping.Segment] = {}
    for *_, s in landings:
        interval = (s.dim, s.hf_start, s.length, s.hf_step)
        copies[interval] += 1
        blocks[interval] = s
    if len(set(copies.values())) != 1:
        raise ProofError(f"{tensor.name}: the engine's blocks overlap unevenly: {dict(copies)}")
    check_tiling(f"{tensor.name} in the engine", tensor.shape, blocks.values())
    if len({(rank, name, s.hf_start) for rank, name, s in landings}) != len(landings):
        raise ProofError(f"{tensor.name}: a block lands twice in a parameter of an engine rank")


def _overlap(dims: Dims, a: mapping.Segment, b: mapping.Segment) -> int:
    """Return the number of elements that are in both blocks of a tensor. ``b`` has no step, unless ``b`` is ``a``."""
    total = 1
    for axis, size in enumerate(dims):
        low, high = 0, size
        if b.dim == axis:
            low, high = b.hf_start, b.hf_end
        count = high - low
        if a.dim == axis:
            # Of the indices from low to high, count only the indices of ``a``.
            _, count = a.within(low, count)
        total *= max(0, count)
    return total


def print_plan(
    console: Console, shape: ModelShape, layout: Layout, engine: EngineLayout, item_bytes: int
) -> None:
    """Prove the resharding, and print the bytes that each rank holds and moves. Raises ProofError, LayoutError."""
    report = prove_resharding(shape, layout, engine, item_bytes)
    console.print(
        f"{shape.family}: {len(mapping.hf_tensors(shape)):,} tensors, {report.model_bytes // item_bytes:,} parameters, "
        f"{_gb(report.model_bytes)} at {item_bytes} bytes each"
    )
    console.print(_trainer_table(shape, layout, report, item_bytes))
    console.print(_engine_table(engine, report))
    console.print(
        "Proved: every element is provided by exactly one trainer rank and lands exactly once on every engine rank "
        "that holds it."
    )
    console.print(f"One update moves {_gb(sum(report.engine))} into the engine.")


def _trainer_table(
    shape: ModelShape, layout: Layout, report: ReshardingReport, item_bytes: int
) -> Table:
    amounts = ("weights per rank", "provides per rank", "sends direct per rank")
    title = f"Trainer: {layout.describe()}, {layout.world_size} ranks"
    table = figures_table(title, "stage", "ranks", "layers", *amounts)
    for stage in range(layout.pipeline):
        # All ranks of a stage hold parameters of equal sizes, so show the first rank.
        first_rank = stage * layout.stage_ranks
        ranks = range(first_rank, first_rank + layout.stage_ranks)
        prove_rank_filled(shape, layout, first_rank)
        parameters = mapping.local_parameters(shape, layout, first_rank)
        resident = sum(math.prod(p.shape) for p in parameters) * item_bytes
        chunks = (local_layers(shape, layout, stage, c) for c in range(layout.chunks))
        table.add_row(
            str(stage),
            f"{ranks[0]}-{ranks[-1]}",
            " ".join(f"{c[0]}-{c[-1]}" for c in chunks),
            _gb(resident),
            _range([report.holds[r] for r in ranks]),
            _range([report.direct[r] for r in ranks]),
        )
    return table


def _engine_table(engine: EngineLayout, report: ReshardingReport) -> Table:
    headings = ("rank", "receives")
    table = figures_table(f"Engine: {engine.describe()}", *headings)
    for rank, received in enumerate(report.engine):
        table.add_row(str(rank), _gb(received))
    return table


def figures_table(title: str, *headings: str) -> Table:
    """Return a table without rows, whose columns are aligned to the right."""
    columns = (Column(heading, justify="right") for heading in headings)
    return Table(*columns, title=title, title_justify="left")


def _range(values: list[int]) -> str:
    low = _gb(min(values))
    high = _gb(max(values))
    return low if low == high else f"{low} to {high}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
