"""What frozen layers with adapters keep for the backward pass, beside or instead of what trained layers keep."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.model.adapters import AdaptedLinear, adapted_linears
from megatron_dppo.planner.job import TrainerJob
from megatron_dppo.planner.kernels import LayerBytes, LocalSizes

_FLOAT = 4


def with_adapters(trained: LayerBytes, s: LocalSizes, job: TrainerJob) -> LayerBytes:
    """``trained``, of a layer whose weights are trained, as it is with adapters on frozen ones.

    - A frozen norm of torch's keeps one fp32 tensor of its size less. A norm that is fused into an adapted linear is
      computed a second time for the adapter, which keeps its input in fp32 where it is bfloat16; Transformer Engine
      keeps of a frozen one what it keeps of a trained one (assumed), and the second one's input and output.
    - An adapter keeps its inner products, rank for each of its matrices, and, where several are fused, A and B as it
      has laid them together: once for a micro-batch.
    - The input that a frozen linear doesn't keep, its adapter does; of linears without adapters this counts too much.
    """
    assert job.trained is not None
    adapters = job.trained.adapters
    own = adapted_linears(adapters, job.shape, job.layout, 0)
    layer = [linear for linear in own if linear.layer == own[0].layer]
    fused = sum(_has_norm(linear) for linear in layer)
    if job.transformer_engine:
        norms = fused * (2 * s.hidden * s.item + _FLOAT) * s.rows
        heads = 0.0
    else:
        again = fused if s.item < _FLOAT else 0
        norms = (again - 2) * s.hidden * _FLOAT * s.rows
        heads = -_FLOAT * (s.query + s.kv) if s.qk_norm else 0.0
    inner = {True: 0.0, False: 0.0}
    for linear in layer:
        rows = s.assignments if linear.of_experts else 1.0
        products = len(linear.parts) * adapters.rank * s.item * rows
        laid_out = _laid_out(linear, adapters.rank) * s.item / job.tokens
        inner[_is_attention(linear)] += products + laid_out
    return replace(
        trained,
        norms=trained.norms + norms,
        projections=trained.projections + heads + inner[True],
        mlp=trained.mlp + inner[False],
    )


def _laid_out(linear: AdaptedLinear, rank: int) -> int:
    """Elements of A and B of a linear in which several matrices are fused."""
    if linear.axis == 1:
        return 0
    width = len(linear.parts) * rank
    return max(1, len(linear.experts)) * width * (linear.rows + linear.parts[0].dims[1])


def _is_attention(linear: AdaptedLinear) -> bool:
    return ".self_attention." in linear.path


def _has_norm(linear: AdaptedLinear) -> bool:
    """Whether the norm before it is part of the linear: column-parallel ones but the experts'."""
    return linear.axis == 0 and not linear.of_experts
