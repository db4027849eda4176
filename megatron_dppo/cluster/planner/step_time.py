"""Predict the seconds of a step from FLOPs and bandwidths; this file names every assumption of the model.

Generation follows a roofline of memory bandwidth and FLOPs, plus the tail of the longest response.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from megatron_dppo.cluster.planner.batch_memory import column_bytes
from megatron_dppo.cluster.planner.colocation import HOST_LINK, switch_seconds
from megatron_dppo.cluster.planner.decode_time import (
    DECODE_OVERHEAD,
    EXPERT_EFFICIENCY,
    HBM_EFFICIENCY,
    PREFILL_UTILISATION,
    REDUCE_LATENCY,
    SEQUENCE_OVERHEAD,
)
from megatron_dppo.cluster.planner.devices import GB, LINK_EFFICIENCY, Cluster
from megatron_dppo.cluster.planner.facts import (
    RolloutFacts,
    RunFacts,
    Schedule,
    TrainerFacts,
    rank_parameters,
)
from megatron_dppo.cluster.planner.generation_time import (
    evaluation_seconds,
    generation_seconds,
    teacher_seconds,
)
from megatron_dppo.cluster.planner.traffic import Traffic
from megatron_dppo.cluster.planner.trainer_state import state_bytes
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape, forward_flops

DENSE_UTILISATION = 0.5
"""Share of a GPU's peak that the forward and backward passes of dense layers reach, without collectives. Set from
published runs (docs/evidence/scale.md)."""
MOE_UTILISATION = 0.13
"""Share of a GPU's peak that the passes of models with fine-grained experts reach in RL. Tuned pretraining with
balanced experts reaches more than twice as much."""
UNBALANCED = 1.1
"""Time of the slowest replica in an optimiser step / the replicas' mean. Assumption: sequences are distributed by
predicted cost (data/balancing.py)."""
OVERHEAD = 0.5
"""Seconds that an optimiser step adds to its passes: optimizer, reductions, launches. Assumption."""

EXCHANGE_RATE = 0.144 * GB
"""Bytes/s of a batch's columns that a rank receives, checks and packs after the last response. 43 GB for 32 ranks take
9.4 s of a core for each rank (docs/evidence/benchmarks.md, "Data plane")."""

HOST_RATE = 200 * GB
"""Bytes/s that all ranks of a node together read from and write to host memory. Assumption: half of the peak of two
sockets with eight channels of DDR5 each."""
HOST_ADAM_BYTES = 40
"""Bytes that torch's fused Adam and the casts of gradient and weight read and write for an offloaded element."""

_LINEAR_PASSES = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Cost of training the linear layers, in forward passes: 1 for forward, 2 for backward, and 1 more under full
recomputation."""
_ATTENTION_PASSES = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""Cost of training flash attention, in forward passes. The backward pass costs 2.5 (Dao, arXiv 2307.08691, section
4.1)."""


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Return the FLOPs of one token's forward and backward pass under ``training.recompute`` = ``recompute``."""
    flops = forward_flops(shape)
    attention = _ATTENTION_PASSES[recompute] * flops.quadratic * length
    return _LINEAR_PASSES[recompute] * flops.linear + attention


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step's phases.

    Attributes:
        schedule: how the phases overlap.
        generation: seconds in which the servers are full.
        recompute_pass: seconds of the passes for recomputed and reference log-probabilities.
        training: seconds of the training passes, with optimizer steps.
        communication: seconds of the collectives in all passes.
        update: seconds of a weight update.
        checkpoint: seconds of a checkpoint / the steps between two checkpoints.
        exchange: seconds in which the columns of the batch, such as recorded routing (R3), reach the ranks.
        tail: seconds in which the last responses end.
        switch: seconds in which shared GPUs change between trainer and servers.
        evaluation: seconds of an evaluation / the steps between two evaluations.
        mean_response, last_response: as in ``GenerationSeconds``.
        teachers: seconds in which the slowest teacher scores the batch, while the servers generate.
    """

    schedule: Schedule
    generation: float
    recompute_pass: float
    training: float
    communication: float
    update: float
    checkpoint: float
    exchange: float = 0.0
    tail: float = 0.0
    switch: float = 0.0
    evaluation: float = 0.0
    mean_response: float = 0.0
    last_response: float = 0.0
    teachers: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by the phase's name, without the phases that this schedule or algorithm does not have."""
        phases = {
            "generation": self.generation,
            "longest responses": self.tail,
            "teachers": self.teachers,
            "recomputed log-probs": self.recompute_pass,
            "training": self.training,
            "collectives": self.communication,
            "columns": self.exchange,
            "switch": self.switch,
            "weight update": self.update,
            "evaluation": self.evaluation,
            "checkpoint": self.checkpoint,
        }
        return {name: seconds for name, seconds in phases.items() if seconds}

    @property
    def trainer(self) -> float:
        """Seconds in which the trainer works on the batch."""
        return self.recompute_pass + self.training + self.communication + self.exchange

    @property
    def servers(self) -> float:
        """Seconds until the batch is generated, and scored by its teachers.

        A teacher scores responses while others are generated, so the slower of the two counts.
        """
        return max(self.generation + self.tail, self.teachers)

    @property
    def total(self) -> float:
        """Seconds of a step: servers, then trainer, then the phases that all GPUs wait for.

        If training and generation overlap, the longer of the two replaces their sum.
        """
        blocking = self.switch + self.update + self.checkpoint
        if self.schedule.overlaps:
            return max(self.decoding, self.trainer) + blocking
        return self.decoding + self.trainer + blocking

    @property
    def decoding(self) -> float:
        """Seconds of a step in which servers generate, or wait for the next batch while the last responses end.

        If weight updates do not wait for running responses, the servers may have to wait for the next batch. Let d be
        the seconds that this property returns, e the staleness, R the trainer's seconds that overlap with generation,
        l the seconds of the last response, and m the seconds of a mean response. A batch passes these times:

        - 0: the batch begins, with an update.
        - (e + 1) d - R - l: the last response starts, at the latest.
        - d: the next batch begins.
        - (e + 1) d - R: all responses have ended, and the training begins.
        - (e + 1) d: the training ends, e steps after the batch's own step.

        From the start of the last response to d, x = l + R - e d seconds, no response starts. The running responses
        end at a constant rate, all of them within m seconds. So the servers lose lost(x) = x^2 / 2m seconds if x <= m,
        and x - m / 2 seconds otherwise. Servers that never wait take s seconds, so d = s + lost(x). But d is at least
        (l + R) / (e + 1), because the last response starts at 0 or later.
        """
        servers = self.servers + self.evaluation
        if self.schedule.drains:
            return servers
        # l + R
        window = self.last_response
        if self.schedule.overlaps:
            window += self.trainer
        least_seconds = window / (self.schedule.staleness + 1)
        return max(servers + self._lost(servers, window), least_seconds)

    def _lost(self, servers: float, window: float) -> float:
        """Return lost(x), the seconds that the servers lose. The docstring of ``decoding`` defines lost(x), x, e and m.

        ``servers`` is s, and ``window`` is l + R. Let y = lost(x). Then d = s + y, so that x = l + R - e (s + y). With
        ``x_without_loss`` = l + R - e s, y = (``x_without_loss`` - x) / e.
        """
        m = self.mean_response
        e = self.schedule.staleness
        x_without_loss = window - e * servers
        if x_without_loss <= 0:
            return 0.0
        # If x <= m: solve x^2 / 2m = y for x.
        x = sqrt((m / e) ** 2 + 2 * m * x_without_loss / e) - m / e
        if x > m:
            # Solve x - m / 2 = y for x.
            x = (x_without_loss / e + m / 2) / (1 + 1 / e)
        return (x_without_loss - x) / e

    @property
    def idle(self) -> dict[str, float]:
        """The share of a step that GPUs wait, by role.

        All GPUs work during a weight update. Servers count as waiting while only the last responses run. Shared GPUs
        also count as waiting while they change between trainer and servers.
        """
        trainer_busy = self.trainer + self.update + self.checkpoint
        server_busy = self.generation + self.evaluation
        if self.schedule.is_colocated:
            return {"GPUs": 1 - (trainer_busy + server_busy) / self.total}
        return {
            "trainers": 1 - trainer_busy / self.total,
            "servers": 1 - (server_busy + self.update) / self.total,
        }

    def gpu_idle(self, trainers: int, servers: int) -> float:
        """Return the share of all GPUs' time that is spent waiting; ``trainers``, ``servers``: GPUs of each role."""
        if self.schedule.is_colocated:
            return self.idle["GPUs"]
        idle_gpus = trainers * self.idle["trainers"] + servers * self.idle["servers"]
        return idle_gpus / (trainers + servers)


def step_seconds(facts: RunFacts, cluster: Cluster, traffic: Traffic) -> StepSeconds:
    """Return the seconds of each phase of a step.

    training = tokens x FLOPs of a token / (GPUs x peak x utilisation) x imbalance x (1 + bubble) x s + optimiser steps
    x overhead, with s = layers of the largest pipeline stage / mean layers of a stage. A pass for recomputed or
    reference log-probabilities costs its forward FLOPs. The seconds of a checkpoint are divided by the steps between
    two checkpoints, and the seconds of an evaluation by the steps between two evaluations.
    """
    trainer, rollout, device = facts.trainer, facts.rollout, cluster.device
    utilisation = MOE_UTILISATION if trainer.shape.is_moe else DENSE_UTILISATION
    rate = trainer.layout.world_size * device.flops * utilisation
    slowdown = UNBALANCED * (1 + bubble(trainer.layout, trainer.micro_batches))
    mean_layers = trainer.shape.num_layers / trainer.layout.pipeline
    slowdown *= _stage_layers(trainer) / mean_layers
    length, tokens = rollout.mean_length, rollout.tokens
    head = head_flops(trainer, rollout)
    training_pass = tokens * (_training_flops(trainer, length) + head.training) / rate * slowdown
    forward = forward_flops(trainer.shape).of_token(length) + head.forward
    forward_pass = tokens * forward / rate * slowdown
    forward_passes = int(facts.spec.algorithm.extra_pass) + int(trainer.config.keeps_reference)
    generation = generation_seconds(facts, cluster)
    update = evaluation = 0.0
    if facts.engine.started:
        update = traffic.update_seconds
    if facts.evaluated_problems:
        evaluation = evaluation_seconds(facts, cluster) / facts.config.evaluation.every
    return StepSeconds(
        schedule=facts.schedule,
        generation=generation.steady,
        tail=generation.tail,
        recompute_pass=forward_passes * forward_pass,
        training=training_pass + rollout.steps * (OVERHEAD + host_adam_seconds(facts, cluster)),
        communication=communication_seconds(facts, cluster),
        switch=switch_seconds(facts, cluster.device),
        update=update,
        exchange=exchange_seconds(facts),
        checkpoint=traffic.checkpoint_seconds / facts.config.checkpoint.every,
        evaluation=evaluation,
        mean_response=generation.mean_response,
        last_response=generation.last_response,
        teachers=teacher_seconds(facts, cluster),
    )


def exchange_seconds(facts: RunFacts) -> float:
    """Return the seconds in which the leaders send the columns of a batch to the ranks that train on them.

    The ranks share the columns' bytes equally. Servers send the columns to the leaders while other responses are still
    generated, so the HTTP replies cost no time of their own.
    """
    columns = column_bytes(facts.trainer.shape, facts.rollout)
    return columns.replicas / (facts.trainer.layout.world_size * EXCHANGE_RATE)


def host_adam_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds in which the hosts update offloaded state in an optimiser step; 0 without offloaded state.

    The ranks of a node share the rate of the node's memory. Each rank copies its fp32 gradients from its GPU before the
    update, and its weights back after the update. The formula assumes that nothing overlaps.
    """
    trainer = facts.trainer
    layout = trainer.layout
    stages = range(layout.pipeline)
    elements = max(state_bytes(trainer, stage).offloaded_elements for stage in stages)
    ranks_of_node = min(layout.world_size, cluster.gpus_per_node)
    adam_seconds = elements * ranks_of_node * HOST_ADAM_BYTES / HOST_RATE
    copied_bytes = elements * (4 + trainer.item_bytes)
    return adam_seconds + copied_bytes / HOST_LINK


@dataclass(frozen=True)
class HeadFlops:
    """A correction of a token's FLOPs: ``forward_flops`` counts an output layer that computes all tokens.

    The correction is the real FLOPs minus the counted FLOPs. It is negative if the output layer skips the prompts.

    Attributes:
        forward: correction of a forward pass.
        training: correction of a forward and a backward pass.
    """

    forward: float
    training: float


def head_flops(trainer: TrainerFacts, rollout: RolloutFacts) -> HeadFlops:
    """Return the corrections of ``HeadFlops``, averaged over the tokens of a sequence.

    The output layer computes only responses (``vocab_parallel/head.py``). One matrix product costs 2 x hidden x
    vocabulary FLOPs a token. Training needs three products, or two if the layer is frozen. The logits of a
    micro-batch's last chunk are kept. All other chunks need one more product, because their logits are computed again.
    The head skips the backward pass of a token whose gradient is zero, but the formula counts that pass.
    """
    product_flops = 2.0 * trainer.shape.hidden_size * trainer.shape.vocab_size
    response_share = rollout.mean_response / rollout.mean_length
    products = 3 if trainer.trained is None else 2
    response_tokens = max(response_share * trainer.tokens, 1.0)
    recomputed_share = response_share * max(
        0.0, 1 - trainer.config.head.chunk_tokens / response_tokens
    )
    # The real products are products * response_share + recomputed_share. ``products`` are counted, and subtracted.
    training_products = products * (response_share - 1) + recomputed_share
    return HeadFlops(
        forward=product_flops * (response_share - 1), training=product_flops * training_products
    )


def _training_flops(trainer: TrainerFacts, length: float) -> float:
    """Return the FLOPs of training on one token.

    Frozen linear layers need no product for the gradients of their weights; the FLOPs of adapters are not counted.
    """
    full_flops = training_flops(trainer.shape, length, trainer.recompute)
    if trainer.trained is None:
        return full_flops
    return full_flops - forward_flops(trainer.shape).linear


def _stage_layers(trainer: TrainerFacts) -> float:
    """Return the layers of the largest pipeline stage, but at least the mean of all stages.

    The mean is larger only if the stages cannot share the layers equally, because ``stage_layers`` rounds down.
    """
    num_layers = trainer.shape.num_layers
    layout = trainer.layout
    return max(layout.most_stage_layers(num_layers), num_layers / layout.pipeline)


def bubble(layout: Layout, micro_batches: int) -> float:
    """Return a pipeline's idle time / busy time: (P - 1) / (v M) (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return (layout.pipeline - 1) / (layout.chunks * micro_batches)


def communication_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds of the collectives in all passes of a step, without any overlap.

    - Tensor parallelism: a layer's forward pass has 2 gathers and 2 scatters (or 2 all-reduces) of tokens x hidden. The
      backward pass has as many, and full recomputation repeats the forward pass. (TP - 1) / TP of the bytes leave a
      rank.
    - Context parallelism with C ranks, in each layer. In a ring, each rank sends its tokens' keys and values C - 1
      times in a forward pass; in the backward pass, it sends keys, values and their gradients C - 1 times. An
      all-to-all sends queries, keys, values and outputs in a forward pass, and their gradients in the backward pass;
      (C - 1) / C of the bytes leave a rank. Transformer Engine hides most of a ring behind attention's arithmetic; the
      formula ignores that.
    - Expert parallelism: each pass sends the hidden state of each (token, expert) pair to the expert and back;
      (EP - 1) / EP of the bytes leave a rank.
    - Replicas and context-parallel ranks: an optimiser step reduces fp32 gradients and gathers weights once.

    A group that spans nodes communicates at the network's rate, and any other group at NVLink's rate.
    """
    trainer = facts.trainer
    layout = trainer.layout
    shape = trainer.shape
    passes = 3 if trainer.recompute == "full" else 2
    rank_tokens = facts.rollout.tokens / (layout.data * layout.context)
    layers = _stage_layers(trainer)
    hidden_bytes = rank_tokens * shape.hidden_size * trainer.item_bytes * layers * passes
    sent_share = (layout.tensor - 1) / layout.tensor
    seconds = 4 * hidden_bytes * sent_share / _rate(cluster, layout.tensor)
    if layout.expert > 1:
        # Tensor-parallel ranks divide the tokens. All expert-tensor-parallel ranks of an expert receive its tokens.
        routed_bytes = (
            2 * hidden_bytes * shape.experts_per_token / layout.tensor * layout.expert_tensor
        )
        sent_share = (layout.expert - 1) / layout.expert
        seconds += routed_bytes * sent_share / _rate(cluster, layout.expert * layout.expert_tensor)
    exchanged_bytes = rank_tokens * layers * context_bytes(trainer)
    seconds += exchanged_bytes / _rate(cluster, layout.tensor * layout.context)
    return seconds + _replica_seconds(facts, cluster)


def context_bytes(trainer: TrainerFacts) -> float:
    """Return the bytes that a rank sends to context-parallel ranks for each of its tokens in all passes of a layer."""
    ranks = trainer.layout.context
    sizes = trainer.shape.sizes()
    query_bytes = sizes["query"] / trainer.layout.tensor * trainer.item_bytes
    kv_bytes = sizes["kv"] / trainer.layout.tensor * trainer.item_bytes
    forward_passes = 2 if trainer.recompute == "full" else 1
    if trainer.exchange == "a2a":
        passes = forward_passes + 1
        return passes * (2 * query_bytes + 2 * kv_bytes) * (ranks - 1) / ranks
    # The backward pass sends keys and values, and their gradients.
    transfers = forward_passes + 2
    return transfers * 2 * kv_bytes * (ranks - 1)


def _replica_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds in which replicas and context-parallel ranks reduce gradients and gather weights."""
    trainer = facts.trainer
    layout = trainer.layout
    if layout.data * layout.context == 1:
        return 0.0
    parameters = rank_parameters(trainer.shape, layout, 0)
    if trainer.trained is not None:
        parameters = trainer.trained.parameters(trainer.shape, layout, 0)
    step_bytes = parameters.elements * (4 + trainer.item_bytes)
    return facts.rollout.steps * step_bytes / _rate(cluster, layout.stage_ranks)


def _rate(cluster: Cluster, ranks: int) -> float:
    """Return the bytes/s of a group of ``ranks`` neighbouring ranks: NVLink's inside a node, else the network's."""
    if ranks <= cluster.gpus_per_node:
        return LINK_EFFICIENCY * cluster.device.nvlink
    return LINK_EFFICIENCY * cluster.device.network


def model_flops_utilisation(facts: RunFacts, seconds: StepSeconds, cluster: Cluster) -> float:
    """Return the trainer's MFU: FLOPs without recomputation / (peak of the trainer's GPUs x seconds of training).

    The FLOPs are 6 x active parameters x tokens, plus attention's FLOPs.
    """
    shape = facts.trainer.shape
    rollout = facts.rollout
    flops = rollout.tokens * training_flops(shape, rollout.mean_length, "none")
    return flops / (seconds.trainer * cluster.device.flops * facts.trainer.layout.world_size)


def assumptions() -> dict[str, float]:
    """Return the constants that the model assumes, by name."""
    return {
        "dense layers' share of peak FLOP/s": DENSE_UTILISATION,
        "experts' share of peak FLOP/s": MOE_UTILISATION,
        "share of a link's rate": LINK_EFFICIENCY,
        "slowest replica over the mean": UNBALANCED,
        "seconds of an optimiser step beside its passes": OVERHEAD,
        "decoding's share of the memory's rate": HBM_EFFICIENCY,
        "experts' share of the memory's rate": EXPERT_EFFICIENCY,
        "prefill's share of peak FLOP/s": PREFILL_UTILISATION,
        "seconds of a decode step beside memory and FLOPs": DECODE_OVERHEAD,
        "seconds of a decode step for each of its sequences": SEQUENCE_OVERHEAD,
        "seconds of a small all-reduce": REDUCE_LATENCY,
        "bytes/s of a batch's columns into a rank": EXCHANGE_RATE,
    }
