"""Memory of a rank that grows with a micro-batch: what forward keeps for backward, and what passes work in."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.model.families import family_of
from megatron_dppo.planner import kernels
from megatron_dppo.planner.adapter_activations import with_adapters
from megatron_dppo.planner.job import TrainerJob
from megatron_dppo.planner.logits import head_bytes
from megatron_dppo.planner.schedule import chunks_in_flight

BUSIEST_RANK = 1.25
"""Tokens on the busiest expert-parallel rank over the mean. Assumption: routing is not balanced by a loss here."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes on one rank at the worst moment of a step.

    ``kept``: layers' tensors of all micro-batches in flight. ``head``: final norm and logits of one micro-batch.
    ``recomputed``: one layer in whole, beside what full recomputation kept; it never meets the head, so the larger of
    the two counts. ``working``: gradients and temporaries.
    """

    kept: int
    head: int
    recomputed: int
    working: int

    @property
    def saved(self) -> int:
        """What autograd holds at most."""
        return self.kept + max(self.head, self.recomputed)

    @property
    def total(self) -> int:
        """And what passes work in."""
        return self.saved + self.working


def layer_bytes(job: TrainerJob, busiest: float = 1.0) -> kernels.LayerBytes:
    """What one layer keeps per token of a micro-batch; ``busiest``: a rank's experts' tokens over the mean."""
    sizes = kernels.LocalSizes.of(
        job, family_of(job.shape).has_layer_parameter("self_attention.q_layernorm.weight")
    )
    made = kernels.transformer_engine if job.transformer_engine else kernels.torch_modules
    found = made(sizes, job.shape.is_moe)
    if job.trained is not None:
        found = with_adapters(found, sizes, job)
    if not job.shape.is_moe:
        return found
    return kernels.LayerBytes(**{**vars(found), "mlp": found.mlp * busiest})


def activation_bytes(
    job: TrainerJob, stage: int, topk: int = 0, busiest: float = BUSIEST_RANK
) -> ActivationBytes:
    """Of each rank of ``stage``, for micro-batches of ``job.tokens`` tokens.

    kept = chunks in flight x layers of a chunk x tokens x bytes that a layer keeps under the recompute setting
    (``kernels``). Full recomputation runs each layer's forward again before its backward (``uniform``, one layer), so
    one layer's whole set lives beside the kept inputs. Working memory: gradients with respect to the widest tensors of
    a layer's backward pass, the experts' (or the MLP's) input and fused product.
    """
    layer = layer_bytes(job, busiest)
    layers = job.shape.num_layers // (job.layout.pipeline * job.layout.chunks)
    in_flight = chunks_in_flight(job.layout, stage, job.micro_batches)
    kept = in_flight * layers * job.tokens * layer.kept(job.recompute)
    is_last = stage == job.layout.pipeline - 1
    return ActivationBytes(
        kept=round(kept),
        head=head_bytes(job, topk) if is_last else 0,
        recomputed=round(job.tokens * layer.whole) if job.recompute == "full" else 0,
        working=round(job.tokens * _working(job, busiest)),
    )


def _working(job: TrainerJob, busiest: float) -> float:
    """Per token: gradients of the widest layer, h + 2f for each (token, expert) pair, and of the hidden states gathered
    over tensor-parallel ranks."""
    sizes = kernels.LocalSizes.of(job, False)
    gathered = 2 * sizes.hidden
    if job.shape.is_moe:
        wide = sizes.assignments * busiest * (2 * sizes.hidden + 2 * sizes.expert_ffn)
    else:
        wide = 2 * sizes.ffn
    return (gathered + wide) * sizes.item
