"""The proof that a weight update from any trainer layout into any engine layout moves every element exactly once.

From shapes alone: the trainer's primary shards tile every Hugging Face tensor; the engine's ranks are filled by blocks
that tile every tensor as often as it is replicated there; and the bytes that this moves, beside the least possible. No
weights are needed: a tensor's pieces are blocks along one dimension, so they tile it when their intervals, sorted, run
from 0 to its length without gap or overlap.
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
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import TensorSources, gather_plan
from megatron_dppo.model.layout import Dims, EngineLayout, Layout, local_layers
from megatron_dppo.model.shape import ModelShape


def check_sources(tensor: TensorSources) -> None:
    """The pieces of one tensor tile it. Raises ProofError."""
    check_tiling(tensor.name, tensor.shape, [p.segment for p in tensor.pieces])
    for piece in tensor.pieces:
        expected = list(tensor.shape)
        expected[piece.segment.dim] = piece.segment.length
        if list(piece.shape) != expected:
            raise ProofError(
                f"{tensor.name}: rank {piece.rank}'s {piece.name} provides a block of {piece.shape}, "
                f"expected {tuple(expected)}"
            )


def prove_rank_filled(shape: ModelShape, layout: Layout, rank: int) -> None:
    """Every element of every parameter of ``rank`` comes from one Hugging Face element, padding apart."""
    tensors, vocabulary = mapping.hf_tensors(shape), family_of(shape).vocabulary_tensors
    for parameter in mapping.local_parameters(shape, layout, rank):
        check_filled(f"rank {rank}: {parameter.name}", parameter, tensors, vocabulary)


def check_filled(
    where: str,
    parameter: mapping.LocalParameter,
    tensors: Mapping[str, Dims],
    vocabulary: Collection[str],
) -> None:
    """The segments tile ``parameter`` and stay inside their sources (``tensors``: their shapes).

    Only parameters made of ``vocabulary`` tensors, or of nothing, may end in padding.
    """
    is_vocabulary = (
        any(s.hf_name in vocabulary for s in parameter.segments) or not parameter.segments
    )
    dim = parameter.segments[0].dim if parameter.segments else 0
    for s in parameter.segments:
        source = tensors[s.hf_name]
        others = [n for i, n in enumerate(source) if i != s.dim]
        if s.hf_start + s.length > source[s.dim] or others != [
            n for i, n in enumerate(parameter.shape) if i != s.dim
        ]:
            raise ProofError(
                f"{where}: segment {s} does not fit {s.hf_name} of shape {tuple(source)}"
            )
    intervals = sorted((s.local_start, s.length) for s in parameter.segments)
    end = _run(where, intervals)
    if any(s.dim != dim for s in parameter.segments):
        raise ProofError(f"{where}: segments along different dimensions")
    if end != parameter.shape[dim] and not is_vocabulary:
        raise ProofError(f"{where}: filled up to {end} of {parameter.shape[dim]} along dim {dim}")


def check_tiling(name: str, dims: Dims, segments: Iterable[mapping.Segment]) -> None:
    """``segments`` cover a tensor of shape ``dims`` exactly once. Raises ProofError."""
    listed = list(segments)
    axes = {s.dim for s in listed}
    if len(axes) != 1:
        raise ProofError(f"{name}: provided along dimensions {sorted(axes)}, expected one")
    (dim,) = axes
    end = _run(name, sorted((s.hf_start, s.length) for s in listed))
    if end != dims[dim]:
        raise ProofError(f"{name}: covered up to {end} of {dims[dim]} along dim {dim}")


def _run(where: str, intervals: list[tuple[int, int]]) -> int:
    """End of the gapless run of ``(start, length)`` from 0."""
    end = 0
    for start, length in intervals:
        if start != end or length < 1:
            times = "twice" if start < end else "never"
            raise ProofError(f"{where}: index {min(start, end)} is provided {times}")
        end = start + length
    return end


_Landing = tuple[int, str, mapping.Segment]
"""Engine rank, its parameter's name, the block that lands there."""


@dataclass(frozen=True)
class ReshardingReport:
    """Bytes of one weight update, by rank.

    ``holds``: distinct weights of which a trainer rank is the primary holder; each must leave it once, so their
    sum, the model, is the lower bound of what the trainer sends. ``direct``: what it would send if every engine rank
    were sent just the blocks that it holds. ``engine``: what each engine rank holds, its lower bound of what it
    receives. ``gathered``: what the gathering rank 0 receives from the others. It then broadcasts whole tensors: every
    engine rank is sent the model.
    """

    model_bytes: int
    holds: tuple[int, ...]
    direct: tuple[int, ...]
    engine: tuple[int, ...]

    @property
    def gathered(self) -> int:
        """Bytes into trainer rank 0."""
        return self.model_bytes - self.holds[0]


def prove_resharding(
    shape: ModelShape, layout: Layout, engine: EngineLayout, item_bytes: int = 2
) -> ReshardingReport:
    """Prove it and count the bytes (``item_bytes`` each element). Raises ProofError, LayoutError."""
    plan = gather_plan(shape, layout)
    for tensor in plan:
        check_sources(tensor)
    landed = _engine_segments(shape, engine)
    holds, direct, received = Counter[int](), Counter[int](), Counter[int]()
    for tensor in plan:
        wanted = landed[tensor.name]
        _check_copies(tensor, wanted)
        for piece in tensor.pieces:
            holds[piece.rank] += piece.elements
            direct[piece.rank] += sum(
                _overlap(tensor.shape, piece.segment, segment) for *_, segment in wanted
            )
        for rank, _, segment in wanted:
            received[rank] += _overlap(tensor.shape, segment, segment)
    if direct.total() != received.total():
        raise ProofError(
            f"trainer ranks would send {direct.total()} elements, the engine receives {received.total()}"
        )
    return ReshardingReport(
        model_bytes=holds.total() * item_bytes,
        holds=tuple(holds[r] * item_bytes for r in range(layout.world_size)),
        direct=tuple(direct[r] * item_bytes for r in range(layout.world_size)),
        engine=tuple(received[r] * item_bytes for r in range(engine.tensor)),
    )


# Many trainer layouts are proved against the same engine, one after another.
@lru_cache(maxsize=1)
def _engine_segments(shape: ModelShape, engine: EngineLayout) -> Mapping[str, list[_Landing]]:
    """For each Hugging Face tensor: where its blocks land. Proves that every rank is filled."""
    tensors, vocabulary = mapping.hf_tensors(shape), family_of(shape).vocabulary_tensors
    landed: dict[str, list[_Landing]] = defaultdict(list)
    for rank in range(engine.tensor):
        for parameter in mapping.engine_parameters(shape, engine, rank):
            check_filled(f"engine rank {rank}: {parameter.name}", parameter, tensors, vocabulary)
            for segment in parameter.segments:
                landed[segment.hf_name].append((rank, parameter.name, segment))
    return landed


def _check_copies(tensor: TensorSources, landed: list[_Landing]) -> None:
    """Blocks along one dimension cover the tensor everywhere equally often, and no parameter of a rank twice."""
    # Copies of a block on several ranks (replicas, shared K/V heads) are the same interval, counted more than once.
    if not landed:
        raise ProofError(f"{tensor.name}: no engine rank receives it")
    copies = Counter((s.dim, s.hf_start, s.length) for *_, s in landed)
    if len(set(copies.values())) != 1:
        raise ProofError(f"{tensor.name}: the engine's blocks overlap unevenly: {dict(copies)}")
    distinct = {(s.dim, s.hf_start, s.length): s for *_, s in landed}
    check_tiling(f"{tensor.name} in the engine", tensor.shape, distinct.values())
    if len({(rank, name, s.hf_start) for rank, name, s in landed}) != len(landed):
        raise ProofError(f"{tensor.name}: a block lands twice in a parameter of an engine rank")


def _overlap(dims: Dims, a: mapping.Segment, b: mapping.Segment) -> int:
    """Elements of a tensor that both blocks hold."""
    total = 1
    for axis, size in enumerate(dims):
        low, high = 0, size
        for s in (a, b):
            if s.dim == axis:
                low, high = max(low, s.hf_start), min(high, s.hf_start + s.length)
        total *= max(0, high - low)
    return total


def print_plan(
    console: Console, shape: ModelShape, layout: Layout, engine: EngineLayout, item_bytes: int
) -> None:
    """Prove, then print who holds and moves how much. Raises ProofError, LayoutError."""
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
    console.print(
        f"One update moves at least {_gb(sum(report.engine))} into the engine. Gathered on trainer rank 0 and "
        f"broadcast: {_gb(report.gathered)} to rank 0, then {_gb(report.model_bytes)} to each engine rank."
    )


def _trainer_table(
    shape: ModelShape, layout: Layout, report: ReshardingReport, item_bytes: int
) -> Table:
    amounts = ("weights a rank", "provides a rank", "sends direct a rank")
    title = f"Trainer: {layout.describe()}, {layout.world_size} ranks"
    table = figures_table(title, "stage", "ranks", "layers", *amounts)
    for stage in range(layout.pipeline):
        first = stage * layout.stage_ranks
        ranks = range(first, first + layout.stage_ranks)
        prove_rank_filled(shape, layout, first)
        resident = (
            sum(math.prod(p.shape) for p in mapping.local_parameters(shape, layout, first))
            * item_bytes
        )
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
    headings = ("rank", "receives at least", "receives by broadcast")
    table = figures_table(f"Engine: {engine.describe()}", *headings)
    for rank, received in enumerate(report.engine):
        table.add_row(str(rank), _gb(received), _gb(report.model_bytes))
    return table


def figures_table(title: str, *headings: str) -> Table:
    columns = (Column(heading, justify="right") for heading in headings)
    return Table(*columns, title=title, title_justify="left")


def _range(values: list[int]) -> str:
    low, high = _gb(min(values)), _gb(max(values))
    return low if low == high else f"{low} to {high}"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB"
