"""Peak memory of one trainer rank's GPU during a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.cluster.planner.activations import ActivationBytes, activation_bytes
from megatron_dppo.cluster.planner.communicators import trainer_communicator_bytes
from megatron_dppo.cluster.planner.devices import CONTEXT, FRAGMENTATION, MIB
from megatron_dppo.cluster.planner.facts import RunFacts, linear_elements
from megatron_dppo.cluster.planner.trainer_state import StateBytes, state_bytes

_COLUMN_PIECE = 64 * MIB
"""``PIECE_BYTES`` of loop/exchange.py: ranks exchange columns over the GPUs in pieces of this size."""
_FP8_COPIES = 2
"""Bytes of the two FP8 copies of a weight's element: one copy is row-wise, the other column-wise. The copies' scales, 4
bytes for 128 x 128 elements, are not counted."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes on the GPU of a rank of a pipeline stage, by part.

    Attributes:
        stage: the pipeline stage.
        state: weights, gradients and optimizer state.
        activations: activations and working memory.
        update_buckets: the larger of the buckets of a weight update and the pieces of exchanged columns.
        communicators: NCCL's buffers.
        context: the process's CUDA context, kernels and libraries.
        fragmentation: memory that the allocator loses to fragmentation.
        quantised: FP8 copies of the layers' weights, which Transformer Engine keeps for all micro-batches of a step.
    """

    stage: int
    state: StateBytes
    activations: ActivationBytes
    update_buckets: int
    communicators: int
    context: int
    fragmentation: int
    quantised: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the peak of training: while the logits exist, or while a layer is recomputed."""
        activations = self.activations
        layers = activations.layers
        head = activations.head + activations.logits
        # The head and a recomputed layer do not exist at the same time: the larger of the two makes the peak.
        if head <= activations.recomputed:
            layers += activations.recomputed
            head = 0
        return {
            "weights": self.state.weights + self.state.reference,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": layers,
            "logits": head,
            "working": activations.working + self.quantised,
            "communicators": self.communicators,
            "context": self.context + self.fragmentation,
        }

    @property
    def total(self) -> int:
        """Peak memory: the larger of training and a weight update."""
        constant = self.state.total + self.communicators + self.context
        training = self.activations.total + self.fragmentation + self.quantised
        return constant + max(training, self.update_buckets)


def rank_bytes(facts: RunFacts, stage: int) -> RankBytes:
    """Return the bytes on the GPU of each rank of ``stage``.

    A weight update holds two messages, or batches: one that is sent, and one that is packed meanwhile. With ``disk`` it
    holds three buckets: one that is gathered, one that is converted to the engine's layout, and one that is written.
    The exchange of columns between ranks holds two pieces. It never overlaps with a weight update.
    """
    activations = activation_bytes(facts.trainer, stage, facts.rollout.compared_topk)
    quantised = 0
    trainer = facts.trainer
    if trainer.transformer_engine and trainer.config.megatron.get("fp8") is not None:
        quantised = _FP8_COPIES * linear_elements(trainer.shape, trainer.layout, stage)
    buckets = 2 if facts.sends_shards else 3
    return RankBytes(
        stage=stage,
        state=state_bytes(facts.trainer, stage),
        activations=activations,
        update_buckets=max(buckets * facts.config.weight_sync.bucket_bytes, 2 * _COLUMN_PIECE),
        communicators=trainer_communicator_bytes(facts.trainer.layout, sends=facts.sends_shards),
        context=CONTEXT,
        fragmentation=round(activations.total * FRAGMENTATION),
        quantised=quantised,
    )
