"""Proofs, from shapes alone, that a mapping moves every element exactly once.

No weights are needed: a tensor's pieces are blocks along one dimension, so they tile it when their intervals, sorted,
run from 0 to its length without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import TensorSources
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import (
    LocalParameter,
    Segment,
    hf_tensors,
    local_parameters,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims


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
    tensors, vocabulary = hf_tensors(shape), family_of(shape).vocabulary_tensors
    for parameter in local_parameters(shape, layout, rank):
        check_filled(f"rank {rank}: {parameter.name}", parameter, tensors, vocabulary)


def check_filled(
    where: str,
    parameter: LocalParameter,
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


def check_tiling(name: str, dims: Dims, segments: Iterable[Segment]) -> None:
    """``segments`` cover a tensor of shape ``dims`` exactly once. Raises ProofError."""
    listed = list(segments)
    used = {s.dim for s in listed}
    if len(used) != 1:
        raise ProofError(f"{name}: provided along dimensions {sorted(used)}, expected one")
    (dim,) = used
    end = _run(name, sorted((s.hf_start, s.length) for s in listed))
    if end != dims[dim]:
        raise ProofError(f"{name}: covered up to {end} of {dims[dim]} along dim {dim}")


def _run(where: str, intervals: list[tuple[int, int]]) -> int:
    """End of the gapless run of ``(start, length)`` from 0."""
    end = 0
    for start, length in intervals:
        if start != end or length < 1:
            what = "twice" if start < end else "never"
            raise ProofError(f"{where}: index {min(start, end)} is provided {what}")
        end = start + length
    return end
