"""All that one trainer rank's GPU holds at the worst moment of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.activations import ActivationBytes, activation_bytes
from megatron_dppo.planner.communicators import trainer_bytes
from megatron_dppo.planner.devices import CONTEXT, FRAGMENTATION
from megatron_dppo.planner.job import Job
from megatron_dppo.planner.optimizer import StateBytes, state_bytes
from megatron_dppo.planner.units import MIB

_COLUMN_PIECE = 64 * MIB
"""``PIECE_BYTES`` of loop/rollouts/exchange.py: columns travel over the device in pieces."""


@dataclass(frozen=True)
class RankBytes:
    """One GPU of a pipeline stage, by part; bytes."""

    stage: int
    state: StateBytes
    activations: ActivationBytes
    update_buckets: int
    communicators: int
    context: int
    fragmentation: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part at the worst moment of training: with the logits, or with a recomputed layer."""
        live = self.activations
        at_logits = live.head > live.recomputed
        return {
            "weights": self.state.weights,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": live.kept + (0 if at_logits else live.recomputed),
            "logits": live.head if at_logits else 0,
            "working": live.working,
            "communicators": self.communicators,
            "context": self.context + self.fragmentation,
        }

    @property
    def total(self) -> int:
        """At the worst moment: of training, or, where that is more, of a weight update."""
        steady = self.state.total + self.communicators + self.context
        training = self.activations.total + self.fragmentation
        return steady + max(training, self.update_buckets)


def rank_bytes(job: Job, stage: int, *, gpu: bool = True) -> RankBytes:
    """Of each rank of ``stage``. Update: a bucket that is gathered, one that is sent, and one on its way to the
    engine's layout; columns on the way between ranks are smaller and earlier."""
    activations = activation_bytes(job.trainer, stage, job.rollout.topk)
    sends = job.engine.servers > 0
    return RankBytes(
        stage=stage,
        state=state_bytes(job.trainer, stage),
        activations=activations,
        update_buckets=max(3 * job.bucket_bytes, 2 * _COLUMN_PIECE) if gpu else 0,
        communicators=trainer_bytes(job.trainer.layout, sends=sends) if gpu else 0,
        context=CONTEXT if gpu else 0,
        fragmentation=round(activations.total * FRAGMENTATION) if gpu else 0,
    )
