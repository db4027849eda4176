"""How long a step takes, by a model of FLOPs and bandwidths whose assumptions are all named here."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.devices import LINK_EFFICIENCY, Cluster, Device
from megatron_dppo.planner.flops import forward_flops, linear_flops, training_flops
from megatron_dppo.planner.generation import evaluation_seconds, generation_seconds
from megatron_dppo.planner.job import Job, TrainerJob
from megatron_dppo.planner.schedule import bubble
from megatron_dppo.planner.transfer import Transfer
from megatron_dppo.planner.weights import rank_parameters

DENSE_UTILISATION = 0.40
"""Share of a GPU's peak that dense layers' forward and backward reach. Assumption, in the range of public figures."""
MOE_UTILISATION = 0.24
"""The same of fine-grained experts: 240 TFLOP/s of 989 on H100, Megatron-LM's published pretraining figure."""
UNBALANCED = 1.1
"""Slowest replica over the mean of an optimiser step, dealt by predicted cost (data/packing.py). Assumption."""
OVERHEAD = 0.5
"""Seconds of an optimiser step beside its passes: optimizer, reductions, launches. Assumption."""


@dataclass(frozen=True)
class StepSeconds:
    """A step's phases, seconds. ``generation`` and the rest overlap with ``rollout.max_staleness`` 1.

    ``evaluation``: one of them, before the first step and after every ``evaluation.every``; in no step's time.
    """

    generation: float
    recompute_pass: float
    training: float
    communication: float
    update: float
    checkpoint: float
    overlapped: bool
    evaluation: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name."""
        return {
            "generation": self.generation,
            "recomputed log-probs": self.recompute_pass,
            "training": self.training,
            "collectives": self.communication,
            "weight update": self.update,
            "checkpoint": self.checkpoint,
        }

    @property
    def trainer(self) -> float:
        """What trainer GPUs do."""
        return self.recompute_pass + self.training + self.communication

    @property
    def total(self) -> float:
        """One step from one update to the next."""
        rest = self.update + self.checkpoint
        if self.overlapped:
            return max(self.generation, self.trainer) + rest
        return self.generation + self.trainer + rest

    @property
    def idle(self) -> dict[str, float]:
        """Share of a step in which the GPUs of trainers, and those of servers, wait for the others; both take part in
        a weight update."""
        return {
            "trainers": 1 - (self.trainer + self.update + self.checkpoint) / self.total,
            "servers": 1 - (self.generation + self.update) / self.total,
        }


def step_seconds(job: Job, cluster: Cluster, transfer: Transfer) -> StepSeconds:
    """training = tokens x FLOPs of a token / (GPUs x peak x utilisation) x imbalance x (1 + bubble) + optimiser steps x
    overhead; a pass for recomputed or reference log-probabilities costs its forward FLOPs; checkpoints are spread
    over the steps between them."""
    trainer, rollout, device = job.trainer, job.rollout, cluster.device
    rate = trainer.layout.world_size * device.flops * _utilisation(trainer)
    slowed = UNBALANCED * (1 + bubble(trainer.layout, trainer.micro_batches))
    length, tokens = rollout.mean_length, rollout.tokens
    train = tokens * _training_flops(trainer, length) / rate * slowed
    again = tokens * forward_flops(trainer.shape, length) / rate * slowed
    return StepSeconds(
        generation=generation_seconds(job, cluster),
        recompute_pass=again * (rollout.recompute_pass + trainer.reference),
        training=train + rollout.steps * OVERHEAD,
        communication=communication_seconds(job, cluster),
        update=transfer.update_seconds if job.engine.servers else 0.0,
        checkpoint=transfer.checkpoint_seconds / job.checkpoint_every,
        overlapped=rollout.staleness > 0,
        evaluation=evaluation_seconds(job, cluster),
    )


def _training_flops(trainer: TrainerJob, length: float) -> float:
    """Of one token; frozen linears need no product for their weights' gradients, and adapters' are left out."""
    every = training_flops(trainer.shape, length, trainer.recompute)
    return every if trainer.trained is None else every - linear_flops(trainer.shape)


def _utilisation(trainer: TrainerJob) -> float:
    return MOE_UTILISATION if trainer.shape.is_moe else DENSE_UTILISATION


def communication_seconds(job: Job, cluster: Cluster) -> float:
    """Collectives of all passes of a step, none overlapped.

    - Tensor parallelism: 2 gathers and 2 scatters (or 2 all-reduces) of tokens x hidden in a layer's forward pass, the
      same in backward, and in forward once more under full recomputation; (TP - 1) / TP of the bytes leave a rank.
    - Experts: each assignment's hidden state goes out and comes back, in every pass; (EP - 1) / EP of them leave.
    - Replicas: gradients fp32 reduced and weights gathered, once in an optimiser step.
    Ranks of a group that spans nodes go at the network's rate, others at NVLink's.
    """
    trainer, layout, shape = job.trainer, job.trainer.layout, job.trainer.shape
    device, node = cluster.device, cluster.gpus_per_node
    passes = 3 if trainer.recompute == "full" else 2
    tokens = job.rollout.tokens / layout.data  # on one replica
    layers = shape.num_layers / layout.pipeline
    hidden = tokens * shape.hidden_size * trainer.item_bytes * layers * passes
    tensor = 4 * hidden * (layout.tensor - 1) / layout.tensor / _link(device, layout.tensor <= node)
    expert = 0.0
    if layout.expert > 1:
        moved = 2 * hidden * shape.experts_per_token / layout.tensor * layout.expert_tensor
        inside = layout.expert * layout.expert_tensor <= node
        expert = moved * (layout.expert - 1) / layout.expert / _link(device, inside)
    return tensor + expert + _replica_seconds(job, cluster)


def _replica_seconds(job: Job, cluster: Cluster) -> float:
    layout = job.trainer.layout
    if layout.data == 1:
        return 0.0
    trained = job.trainer.trained
    held = rank_parameters(job.trainer.shape, layout, 0)
    if trained is not None:
        held = trained.parameters(job.trainer.shape, layout, 0)
    moved = held.elements * (4 + job.trainer.item_bytes)
    inside = layout.stage_ranks <= cluster.gpus_per_node
    return job.rollout.steps * moved / _link(cluster.device, inside)


def _link(device: Device, inside_a_node: bool) -> float:
    return LINK_EFFICIENCY * (device.nvlink if inside_a_node else device.network)


def model_flops_utilisation(job: Job, seconds: StepSeconds, cluster: Cluster) -> float:
    """6 x active parameters x tokens, and attention's, over the trainer's peak during its own seconds."""
    shape, rollout = job.trainer.shape, job.rollout
    useful = rollout.tokens * training_flops(shape, rollout.mean_length, "none")
    return useful / (seconds.trainer * cluster.device.flops * job.trainer.layout.world_size)


def assumptions() -> dict[str, float]:
    """What the model takes for granted, by name."""
    return {
        "dense layers' share of peak FLOP/s": DENSE_UTILISATION,
        "experts' share of peak FLOP/s": MOE_UTILISATION,
        "share of a link's rate": LINK_EFFICIENCY,
        "slowest replica over the mean": UNBALANCED,
        "seconds of an optimiser step beside its passes": OVERHEAD,
    }
