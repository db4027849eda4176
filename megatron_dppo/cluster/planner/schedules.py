"""Megatron-Core's pipeline schedules: the number of micro-batches that a stage holds at once, and its idle time."""

from __future__ import annotations

from megatron_dppo.model.layout import Layout


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Return the largest number of model chunks' forward passes on ``stage`` that wait for their backward pass.

    The number is the warm-up of ``get_pp_rank_microbatches`` (pipeline_parallel/schedules.py) + 1, at most all forward
    passes of a step. On stage p of P, the warm-up is P - p - 1 for 1F1B, and 2 (P - p - 1) + (v - 1) P for v
    interleaved chunks.
    """
    stages = layout.pipeline
    chunks = layout.chunks
    if stages == 1:
        return 1
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * stages
    return min(warmup + 1, micro_batches * chunks)


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return a pipeline's idle time / busy time: (P - 1) / (v M) (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return (layout.pipeline - 1) / (layout.chunks * micro_batches)
