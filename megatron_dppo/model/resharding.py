"""The proof that a weight update from any trainer layout into any engine layout moves every element exactly once.

From shapes alone: the trainer's primary shards tile every Hugging Face tensor; the engine's ranks are filled by blocks
that tile every tensor as often as it is replicated there; and the bytes that this moves, beside the least possible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from megatron_dppo.model.engine_layout import EngineLayout, engine_parameters
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import Segment, hf_tensors
from megatron_dppo.model.proof import check_filled, check_sources
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims

_Landing = tuple[int, str, Segment]
"""Engine rank, its parameter's name, the block that lands there."""


@dataclass(frozen=True)
class ReshardingReport:
    """Bytes of one weight update, by rank.

    ``holds``: distinct weights of which a trainer rank is the primary holder; each must leave it once, so their
    sum, the model, is the lower bound of what the trainer sends. ``direct``: what it would send if every engine rank
    were sent just the blocks that it holds. ``engine``: what each engine rank holds, its lower bound of what it
    receives. ``gathered``: what the gathering rank 0 receives from the others, and ``broadcast``: what every engine
    rank is sent when rank 0 then broadcasts whole tensors (the model).
    """

    model_bytes: int
    holds: tuple[int, ...]
    direct: tuple[int, ...]
    engine: tuple[int, ...]

    @property
    def gathered(self) -> int:
        """Bytes into trainer rank 0."""
        return self.model_bytes - self.holds[0]

    @property
    def broadcast(self) -> int:
        """Bytes into each engine rank by broadcast."""
        return self.model_bytes


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
            received[rank] += _elements(tensor.shape, segment)
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


@lru_cache(maxsize=1)
def _engine_segments(shape: ModelShape, engine: EngineLayout) -> Mapping[str, list[_Landing]]:
    """For each Hugging Face tensor: where its blocks land. Proves that every rank is filled."""
    tensors, vocabulary = hf_tensors(shape), family_of(shape).vocabulary_tensors
    landed: dict[str, list[_Landing]] = defaultdict(list)
    for rank in range(engine.tensor):
        for parameter in engine_parameters(shape, engine, rank):
            check_filled(f"engine rank {rank}: {parameter.name}", parameter, tensors, vocabulary)
            for segment in parameter.segments:
                landed[segment.hf_name].append((rank, parameter.name, segment))
    return landed


def _check_copies(tensor: TensorSources, landed: list[_Landing]) -> None:
    """Blocks along one dimension cover the tensor everywhere equally often, and no parameter of a rank twice."""
    if not landed:
        raise ProofError(f"{tensor.name}: no engine rank receives it")
    intervals = Counter((s.dim, s.hf_start, s.length) for *_, s in landed)
    if len(set(intervals.values())) != 1 or len({dim for dim, *_ in intervals}) != 1:
        raise ProofError(f"{tensor.name}: the engine's blocks overlap unevenly: {dict(intervals)}")
    end = 0
    for _, start, length in sorted(intervals):
        if start != end:
            raise ProofError(
                f"{tensor.name}: index {min(start, end)} lands {'twice' if start < end else 'nowhere'}"
            )
        end = start + length
    if end != tensor.shape[landed[0][-1].dim]:
        raise ProofError(f"{tensor.name}: lands up to {end} of {tensor.shape}")
    if len({(rank, name, s.hf_start) for rank, name, s in landed}) != len(landed):
        raise ProofError(f"{tensor.name}: a block lands twice in a parameter of an engine rank")


def _elements(dims: Dims, segment: Segment) -> int:
    total = segment.length
    for axis, size in enumerate(dims):
        total *= 1 if axis == segment.dim else size
    return total


def _overlap(dims: Dims, a: Segment, b: Segment) -> int:
    """Elements of a tensor that both blocks hold."""
    total = 1
    for axis, size in enumerate(dims):
        low, high = 0, size
        for s in (a, b):
            if s.dim == axis:
                low, high = max(low, s.hf_start), min(high, s.hf_start + s.length)
        total *= max(0, high - low)
    return total
