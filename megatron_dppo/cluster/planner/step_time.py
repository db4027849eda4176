"""How long a step takes, by a model of FLOPs and bandwidths whose assumptions are all named here.

Servers generate by a roofline of memory bandwidth and FLOPs, with the tail of the longest response.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2, sqrt

from megatron_dppo.cluster.planner.activations import bubble
from megatron_dppo.cluster.planner.colocation import switch_seconds
from megatron_dppo.cluster.planner.devices import LINK_EFFICIENCY, Cluster, Device
from megatron_dppo.cluster.planner.facts import (
    EngineFacts,
    RolloutFacts,
    RunFacts,
    Schedule,
    TrainerFacts,
    rank_parameters,
)
from megatron_dppo.cluster.planner.memory import chunk_tokens, engine_bytes, kv_bytes_per_token
from megatron_dppo.cluster.planner.traffic import Traffic
from megatron_dppo.model.shape import ModelShape, active_parameters
from megatron_dppo.model.shape import forward_flops as model_flops


def linear_flops(shape: ModelShape) -> float:
    """Of one token's forward pass in matrix products: twice the weights that multiply it."""
    return model_flops(shape).linear


def attention_flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass, on average over a causal sequence of ``length`` tokens."""
    return model_flops(shape).quadratic * length


def forward_flops(shape: ModelShape, length: float) -> float:
    """Of one token of a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


# What a server over several nodes pays for its network: tensor parallelism's collectives in a
# forward pass, and what one pipeline stage hands to the next.

_ITEM = 2


def network_seconds(
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float, sampled: float
) -> float:
    """Seconds between nodes in one forward pass over ``tokens`` tokens, of which ``sampled`` get logits; 0 where
    a tensor parallel group is inside a node.

    SGLang all-reduces hidden states (bf16) after the embedding and twice in a layer, and gathers the logits; across
    nodes that is NCCL's. Its model (``src/graph/tuning.cc``): latency + bytes / rate. With n GPUs on h nodes each
    pays 2 ceil(log2 h) x the network's latency (a tree up and down), and 2 (n - 1) / n of the bytes of an all-reduce,
    (n - 1) / n of a gather, cross between nodes, on the ports of all n / h GPUs of a node at once.
    """
    size, nodes = engine.tensor, ceil(engine.tensor / cluster.gpus_per_node)
    if nodes == 1:
        return 0.0
    reductions = 2 * shape.num_layers + 1
    reduced = reductions * tokens * shape.hidden_size * _ITEM
    gathered = sampled * shape.vocab_size * _ITEM
    moved = (2 * reduced + gathered) * (size - 1) / size
    rate = size / nodes * cluster.device.network * LINK_EFFICIENCY
    latency = 2 * ceil(log2(nodes)) * cluster.network_latency
    return (reductions + 1) * latency + moved / rate


def hand_over_seconds(
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float
) -> float:
    """Seconds in which a pipeline stage hands ``tokens`` hidden states (bf16) to a stage on another node; 0 where all
    stages are on one. Each GPU of the stage sends its part, on a port of its own: latency + bytes / rate."""
    if engine.pipeline == 1 or engine.gpus <= cluster.gpus_per_node:
        return 0.0
    sent = tokens * shape.hidden_size * _ITEM / engine.tensor
    return cluster.network_latency + sent / (cluster.device.network * LINK_EFFICIENCY)


# One decode step.

HBM_EFFICIENCY = 0.7
"""Share of the memory's rate that decoding reaches in dense weights and KV cache. Holds in the published runs of dense
models (docs/scale.md)."""
EXPERT_EFFICIENCY = 0.55
"""The same of the experts' weights, of which each serves a few tokens. Set from published runs (docs/scale.md)."""
PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""
DECODE_OVERHEAD = 0.004
"""Seconds of a decode step beside weights and KV cache: launches, sampling, scheduling. Assumption."""
SEQUENCE_OVERHEAD = 10e-6
"""Seconds of a decode step for each sequence beside these: sampling, its log-probability, scheduling, detokenizing. Set
from published runs (docs/scale.md)."""
REDUCE_LATENCY = 15e-6
"""Seconds of one small all-reduce over NVLink beside its bytes. Assumption."""


def decode_seconds(facts: RunFacts, cluster: Cluster, running: float, context: float) -> float:
    """One decode step of a server with ``running`` sequences of ``context`` tokens: max(bytes / memory rate, FLOPs /
    peak) + collectives + an overhead, and one of each sequence. Bytes of a GPU: the weights that the batch touches, and
    the KV cache of all sequences.

    With p pipeline stages the batch is p parts, each in another stage, and every part passes all stages: p times what
    a stage, 1 / p of the layers, takes for a part and for handing it on. So weights are read p times.
    """
    shape, engine, device = facts.trainer.shape, facts.engine, cluster.device
    stages = engine.pipeline
    part = max(1.0, running / stages)
    touched = touched_parameters(shape, part)
    cache = part * context * kv_bytes_per_token(shape, engine)
    memory = (touched.dense * _ITEM / engine.gpus + cache) / (device.hbm * HBM_EFFICIENCY)
    memory += touched.experts * _ITEM / engine.gpus / (device.hbm * EXPERT_EFFICIENCY)
    flops = part * (linear_flops(shape) + 2 * attention_flops(shape, context)) / engine.gpus
    compute = flops / (device.flops * PREFILL_UTILISATION)
    beside = DECODE_OVERHEAD + hand_over_seconds(shape, engine, cluster, part)
    reduce = reduce_seconds(shape, engine, device, part)
    reduce += network_seconds(shape, engine, cluster, part, part)
    return stages * (max(memory, compute) + beside) + running * SEQUENCE_OVERHEAD + reduce


def reduce_seconds(shape: ModelShape, engine: EngineFacts, device: Device, tokens: float) -> float:
    """Of a forward pass's all-reduces within a node, two a layer: latency, and 2 (n - 1) / n of the hidden states'
    bytes (bf16) over NVLink."""
    size = engine.tensor
    if size == 1:
        return 0.0
    moved = 2 * (size - 1) / size * tokens * shape.hidden_size * _ITEM
    each = REDUCE_LATENCY + moved / (device.nvlink * LINK_EFFICIENCY)
    return 2 * shape.num_layers * each


@dataclass(frozen=True)
class Touched:
    """Weights that a decode step reads."""

    dense: float
    experts: float


def touched_parameters(shape: ModelShape, running: float) -> Touched:
    """By a batch of ``running`` tokens: with uniform routing 1 - (1 - k / E)^running of the experts."""
    if not shape.is_moe:
        return Touched(float(active_parameters(shape)), 0.0)
    expert = shape.num_layers * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense = active_parameters(shape) - expert * shape.experts_per_token
    share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return Touched(dense, expert * shape.num_experts * share)


# A rollout batch.


@dataclass(frozen=True)
class GenerationSeconds:
    """Of a rollout batch, on all servers. ``steady``: servers are full; ``tail``: few of the longest responses are
    left, and the next batch may not begin. ``mean_response``: one of that length, on a full server; ``last_response``:
    the longest, begun when no other waits."""

    steady: float
    tail: float
    mean_response: float = 0.0
    last_response: float = 0.0

    @property
    def total(self) -> float:
        return self.steady + self.tail


def generation_seconds(facts: RunFacts, cluster: Cluster) -> GenerationSeconds:
    """Seconds of a rollout batch under the run's schedule.

    Where every step waits for all of its responses, from the first prompt to the last response: steady = sampled tokens
    of a server / sequences at once, each at the decode step of that batch and half of the mean length, and prompts
    once a group (the prefix cache serves the rest); tail = what the longest response needs beyond the mean one, with a
    tenth of the sequences.

    Where responses go on after an update there is no tail, but each update prefills what is running again. What the
    longest response then costs depends on the trainer, too: ``StepSeconds.decoding``.
    """
    rollout, schedule = facts.rollout, facts.schedule
    # Responses come from a file, or from servers that others started.
    if not facts.engine.servers:
        return GenerationSeconds(0.0, 0.0)
    running = sequences_at_once(facts, cluster)
    context = rollout.mean_prompt + rollout.mean_response / 2
    step = decode_seconds(facts, cluster, running, context)
    steady = rollout.response_tokens / facts.engine.servers / running * step
    steady += prefill_seconds(facts, cluster)
    mean, longest = rollout.mean_response, rollout.longest_response
    tail = (longest - mean) * decode_seconds(facts, cluster, max(1.0, running / 10), longest)
    if schedule.drains:
        return GenerationSeconds(steady, tail, mean * step, mean * step + tail)
    steady += resumed_seconds(facts, cluster, running)
    return GenerationSeconds(steady, 0.0, mean * step, mean * step + tail)


def sequences_at_once(facts: RunFacts, cluster: Cluster) -> float:
    """That a server runs: what waits for it, what its KV cache holds, what clients ask for at a time; the least."""
    rollout = facts.rollout
    ahead = 1 if facts.schedule.drains else max(1, facts.schedule.staleness)
    waiting = ahead * rollout.responses / facts.engine.servers
    return max(1.0, min(waiting, server_slots(facts, cluster)))


def server_slots(facts: RunFacts, cluster: Cluster) -> float:
    """Sequences that a server has room for: what its KV cache holds, what clients ask for at a time; the less."""
    rollout, engine = facts.rollout, facts.engine
    memory = engine_bytes(facts.trainer.shape, engine, rollout, cluster.device)
    leaders = facts.trainer.layout.data * rollout.max_concurrent / engine.servers
    return min(memory.sequences, leaders)


def resumed_seconds(facts: RunFacts, cluster: Cluster, running: float) -> float:
    """Of prefilling ``running`` sequences of a server again, half of their mean length done, after an update."""
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    length = rollout.mean_prompt + rollout.mean_response / 2
    flops = running * length * forward_flops(shape, length)
    return flops / (engine.gpus * cluster.device.flops * PREFILL_UTILISATION)


def evaluation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """One evaluation: generation of all its responses, which are as long as training's unless its limit is lower."""
    evaluation = facts.evaluation
    if evaluation is None:
        return 0.0
    rollout = replace(
        facts.rollout,
        prompts=evaluation.problems,
        group_size=evaluation.samples,
        longest_response=evaluation.longest_response,
        mean_response=min(facts.rollout.mean_response, evaluation.longest_response),
    )
    drained = replace(facts, rollout=rollout, schedule=replace(facts.schedule, drains=True))
    return generation_seconds(drained, cluster).total


def prefill_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Every prompt once, on all servers: FLOPs / (peak x utilisation) + what passes over chunks of prompts take
    between nodes. With p pipeline stages p - 1 more passes fill and drain them."""
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    tokens = rollout.prompts * rollout.mean_prompt / engine.servers
    seconds = tokens * linear_flops(shape)
    seconds /= engine.gpus * cluster.device.flops * PREFILL_UTILISATION
    passes = ceil(tokens / chunk_tokens(engine, cluster.device))
    prompts = rollout.prompts / engine.servers
    chunk, stages = tokens / passes, engine.pipeline
    moved = network_seconds(shape, engine, cluster, chunk, prompts / passes) / stages
    moved += hand_over_seconds(shape, engine, cluster, chunk)
    return (seconds / passes + moved) * (passes + stages - 1)


# A step.

DENSE_UTILISATION = 0.5
"""Share of a GPU's peak that dense layers' forward and backward reach, collectives left out. Set from published runs
(docs/scale.md)."""
MOE_UTILISATION = 0.13
"""The same of fine-grained experts, in RL: tuned pretraining, its experts asked alike, reaches more than twice that."""
UNBALANCED = 1.1
"""Slowest replica over the mean of an optimiser step, dealt by predicted cost (data/packing.py). Assumption."""
OVERHEAD = 0.5
"""Seconds of an optimiser step beside its passes: optimizer, reductions, launches. Assumption."""

_BACKWARD = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Passes' worth of linear layers in a training step: forward, backward twice, and again forward under full
recomputation."""
_ATTENTION = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""The same of flash attention, whose backward pass costs 2.5 forward ones (Dao, arXiv 2307.08691, section 4.1)."""


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Of one token's forward and backward pass under a setting of ``training.recompute``."""
    linear, attention = linear_flops(shape), attention_flops(shape, length)
    return _BACKWARD[recompute] * linear + _ATTENTION[recompute] * attention


@dataclass(frozen=True)
class StepSeconds:
    """A step's phases, seconds.

    ``generation``: while servers are full; ``tail``: while the last responses end. ``switch``: between trainer and
    servers on the same GPUs. ``evaluation``: of one, over the steps between two. ``mean_response``, ``last_response``:
    of one response of that length, and of the longest where no other waits any more.
    """

    schedule: Schedule
    generation: float
    recompute_pass: float
    training: float
    communication: float
    update: float
    checkpoint: float
    tail: float = 0.0
    switch: float = 0.0
    evaluation: float = 0.0
    mean_response: float = 0.0
    last_response: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """By name; what this schedule or algorithm has not is left out."""
        every = {
            "generation": self.generation,
            "longest responses": self.tail,
            "recomputed log-probs": self.recompute_pass,
            "training": self.training,
            "collectives": self.communication,
            "switch": self.switch,
            "weight update": self.update,
            "evaluation": self.evaluation,
            "checkpoint": self.checkpoint,
        }
        return {name: seconds for name, seconds in every.items() if seconds}

    @property
    def trainer(self) -> float:
        """What trainer GPUs do."""
        return self.recompute_pass + self.training + self.communication

    @property
    def servers(self) -> float:
        """What servers do."""
        return self.generation + self.tail

    @property
    def total(self) -> float:
        """Of a step: servers, then trainer, then what all wait for; or, with stale responses on GPUs of their own, the
        longer of the two, and what all wait for."""
        rest = self.switch + self.update + self.checkpoint
        if self.schedule.overlaps:
            return max(self.decoding, self.trainer) + rest
        return self.decoding + self.trainer + rest

    @property
    def decoding(self) -> float:
        """Seconds of a step in which servers have work, or wait for the next batch while responses end.

        Where an update interrupts responses, a batch begins with one update and must have ended when its training
        begins, e steps later (e: staleness). With d of these seconds a step, l the last response and R the trainer's
        seconds beside them, its last prompts have left the queue by (e + 1) d - R - l at the latest, and the next batch
        begins at d. In the x = l + R - e d between them servers empty. What runs there ends at a constant rate, within
        a mean response's seconds m: x^2 / 2m are lost of servers' time, or x - m / 2. So d = servers + lost(x), and
        d >= (l + R) / (e + 1), where all of a batch runs at once.
        """
        servers, batches = self.servers + self.evaluation, self.schedule.staleness
        if self.schedule.drains:
            return servers
        window = self.last_response + (self.trainer if self.schedule.overlaps else 0.0)
        return max(servers + self._starved(servers, window), window / (batches + 1))

    def _starved(self, servers: float, window: float) -> float:
        """y = lost(x), where x = ``window`` - e (``servers`` + y)."""
        mean, batches = self.mean_response, self.schedule.staleness
        at_most = window - batches * servers
        if at_most <= 0:
            return 0.0
        # x^2 / 2m = (at_most - x) / e
        x = sqrt((mean / batches) ** 2 + 2 * mean * at_most / batches) - mean / batches
        if x > mean:
            x = (at_most / batches + mean / 2) / (1 + 1 / batches)
        return (at_most - x) / batches

    @property
    def idle(self) -> dict[str, float]:
        """By role, the share of a step in which its GPUs wait. All take part in a weight update. A server with the
        last responses alone counts as waiting, and so do GPUs between trainer and servers."""
        trainers = self.trainer + self.update + self.checkpoint
        servers = self.generation + self.evaluation
        if self.schedule.is_colocated:
            return {"GPUs": 1 - (trainers + servers) / self.total}
        return {
            "trainers": 1 - trainers / self.total,
            "servers": 1 - (servers + self.update) / self.total,
        }

    def gpu_idle(self, trainers: int, servers: int) -> float:
        """Share of all GPUs' time that is waited away; ``trainers``, ``servers``: GPUs of each."""
        if self.schedule.is_colocated:
            return self.idle["GPUs"]
        waited = trainers * self.idle["trainers"] + servers * self.idle["servers"]
        return waited / (trainers + servers)


def step_seconds(facts: RunFacts, cluster: Cluster, traffic: Traffic) -> StepSeconds:
    """training = tokens x FLOPs of a token / (GPUs x peak x utilisation) x imbalance x (1 + bubble) + optimiser steps x
    overhead; a pass for recomputed or reference log-probabilities costs its forward FLOPs; checkpoints and evaluations
    are spread over the steps between them."""
    trainer, rollout, device = facts.trainer, facts.rollout, cluster.device
    rate = trainer.layout.world_size * device.flops * _utilisation(trainer)
    slowed = UNBALANCED * (1 + bubble(trainer.layout, trainer.micro_batches))
    length, tokens = rollout.mean_length, rollout.tokens
    head = head_flops(trainer, rollout)
    train = tokens * (_training_flops(trainer, length) + head.training) / rate * slowed
    again = tokens * (forward_flops(trainer.shape, length) + head.forward) / rate * slowed
    generated = generation_seconds(facts, cluster)
    evaluated = evaluation_seconds(facts, cluster)
    return StepSeconds(
        schedule=facts.schedule,
        generation=generated.steady,
        tail=generated.tail,
        recompute_pass=again * (rollout.recompute_pass + trainer.reference),
        training=train + rollout.steps * OVERHEAD,
        communication=communication_seconds(facts, cluster),
        switch=switch_seconds(facts, cluster.device),
        update=traffic.update_seconds if facts.engine.servers else 0.0,
        checkpoint=traffic.checkpoint_seconds / facts.checkpoint_every,
        evaluation=evaluated / facts.evaluation.every if facts.evaluation is not None else 0.0,
        mean_response=generated.mean_response,
        last_response=generated.last_response,
    )


@dataclass(frozen=True)
class HeadFlops:
    """Floating-point operations of a token in the output layer beyond those that a layer over all tokens would take;
    negative where prompts are spared."""

    forward: float
    training: float


def head_flops(trainer: TrainerFacts, rollout: RolloutFacts) -> HeadFlops:
    """On average over a sequence. Only responses meet the output layer (``vocab_parallel/head.py``): p = 2 x hidden x
    vocabulary for each product, three in training, two where it is frozen; and one more for the logits of all chunks of
    a micro-batch but the last, which are computed again. Rows without a gradient are not counted off."""
    product = 2.0 * trainer.shape.hidden_size * trainer.shape.vocab_size
    share = rollout.mean_response / rollout.mean_length
    products = 3 if trainer.trained is None else 2
    counted = max(share * trainer.tokens, 1.0)
    again = share * max(0.0, 1 - trainer.chunk_tokens / counted)
    return HeadFlops(product * (share - 1), product * (products * (share - 1) + again))


def _training_flops(trainer: TrainerFacts, length: float) -> float:
    """Of one token; frozen linears need no product for their weights' gradients, and adapters' are left out."""
    every = training_flops(trainer.shape, length, trainer.recompute)
    return every if trainer.trained is None else every - linear_flops(trainer.shape)


def _utilisation(trainer: TrainerFacts) -> float:
    return MOE_UTILISATION if trainer.shape.is_moe else DENSE_UTILISATION


def communication_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Collectives of all passes of a step, none overlapped.

    - Tensor parallelism: 2 gathers and 2 scatters (or 2 all-reduces) of tokens x hidden in a layer's forward pass, the
      same in backward, and in forward once more under full recomputation; (TP - 1) / TP of the bytes leave a rank.
    - Context parallelism, in a layer: around a ring each of C ranks sends its tokens' keys and values on C - 1 times
      in a forward pass, and in the backward pass these and their gradients; an all-to-all sends queries, keys, values
      and outputs, or their gradients, of which (C - 1) / C leave a rank. Transformer Engine hides most of a ring behind
      attention's arithmetic, which is not counted here.
    - Experts: each assignment's hidden state goes out and comes back, in every pass; (EP - 1) / EP of them leave.
    - Replicas and context-parallel ranks: gradients fp32 reduced and weights gathered, once in an optimiser step.
    Ranks of a group that spans nodes go at the network's rate, others at NVLink's.
    """
    trainer, layout, shape = facts.trainer, facts.trainer.layout, facts.trainer.shape
    device, node = cluster.device, cluster.gpus_per_node
    passes = 3 if trainer.recompute == "full" else 2
    tokens = facts.rollout.tokens / (layout.data * layout.context)  # on one rank
    layers = shape.num_layers / layout.pipeline
    hidden = tokens * shape.hidden_size * trainer.item_bytes * layers * passes
    tensor = 4 * hidden * (layout.tensor - 1) / layout.tensor / _link(device, layout.tensor <= node)
    expert = 0.0
    if layout.expert > 1:
        moved = 2 * hidden * shape.experts_per_token / layout.tensor * layout.expert_tensor
        inside = layout.expert * layout.expert_tensor <= node
        expert = moved * (layout.expert - 1) / layout.expert / _link(device, inside)
    context = (
        tokens
        * layers
        * context_bytes(trainer)
        / _link(device, layout.tensor * layout.context <= node)
    )
    return tensor + context + expert + _replica_seconds(facts, cluster)


def context_bytes(trainer: TrainerFacts) -> float:
    """Bytes that a rank sends to others for each of its tokens in a layer's passes."""
    ranks, sizes = trainer.layout.context, trainer.shape.sizes()
    query, kv = (
        sizes[name] / trainer.layout.tensor * trainer.item_bytes for name in ("query", "kv")
    )
    forwards = 2 if trainer.recompute == "full" else 1
    if trainer.exchange == "a2a":
        return (forwards + 1) * (2 * query + 2 * kv) * (ranks - 1) / ranks
    return (forwards + 2) * 2 * kv * (ranks - 1)


def _replica_seconds(facts: RunFacts, cluster: Cluster) -> float:
    layout = facts.trainer.layout
    if layout.data * layout.context == 1:
        return 0.0
    trained = facts.trainer.trained
    parameters = rank_parameters(facts.trainer.shape, layout, 0)
    if trained is not None:
        parameters = trained.parameters(facts.trainer.shape, layout, 0)
    moved = parameters.elements * (4 + facts.trainer.item_bytes)
    inside = layout.stage_ranks <= cluster.gpus_per_node
    return facts.rollout.steps * moved / _link(cluster.device, inside)


def _link(device: Device, inside_a_node: bool) -> float:
    return LINK_EFFICIENCY * (device.nvlink if inside_a_node else device.network)


def model_flops_utilisation(facts: RunFacts, seconds: StepSeconds, cluster: Cluster) -> float:
    """6 x active parameters x tokens, and attention's, over the trainer's peak during its own seconds."""
    shape, rollout = facts.trainer.shape, facts.rollout
    useful = rollout.tokens * training_flops(shape, rollout.mean_length, "none")
    return useful / (seconds.trainer * cluster.device.flops * facts.trainer.layout.world_size)


def assumptions() -> dict[str, float]:
    """What the model takes for granted, by name."""
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
        "of each of its sequences": SEQUENCE_OVERHEAD,
        "seconds of a small all-reduce": REDUCE_LATENCY,
    }
