"""How long a step takes, by a model of FLOPs and bandwidths whose assumptions are all named here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

from megatron_dppo.model.shape import ModelShape, active_parameters
from megatron_dppo.model.shape import forward_flops as model_flops
from megatron_dppo.planner.activations import bubble
from megatron_dppo.planner.devices import LINK_EFFICIENCY, Cluster, Device
from megatron_dppo.planner.facts import EngineFacts, RolloutFacts, RunFacts, TrainerFacts
from megatron_dppo.planner.memory import chunk_tokens, engine_bytes, kv_bytes_per_token
from megatron_dppo.planner.parameters import rank_parameters
from megatron_dppo.planner.traffic import Traffic

# Floating-point operations of a token, from those of a sequence (model/flops.py).

_BACKWARD = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Passes' worth of linear layers in a training step: forward, backward twice, and again forward under full
recomputation."""
_ATTENTION = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""The same of flash attention, whose backward pass costs 2.5 forward ones (Dao, arXiv 2307.08691, section 4.1)."""


def linear_flops(shape: ModelShape) -> float:
    """Of one token's forward pass in matrix products: twice the weights that multiply it."""
    return model_flops(shape).linear


def attention_flops(shape: ModelShape, length: float) -> float:
    """Of one token's forward pass, on average over a causal sequence of ``length`` tokens."""
    return model_flops(shape).quadratic * length


def forward_flops(shape: ModelShape, length: float) -> float:
    """Of one token of a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Of one token's forward and backward pass under a setting of ``training.recompute``."""
    linear, attention = linear_flops(shape), attention_flops(shape, length)
    return _BACKWARD[recompute] * linear + _ATTENTION[recompute] * attention


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


# How long servers take to generate a rollout batch: a roofline of memory bandwidth and FLOPs, and the longest tail.

HBM_EFFICIENCY = 0.7
"""Share of the memory's rate that decoding reaches. Assumption."""
PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""
DECODE_OVERHEAD = 0.004
"""Seconds of a decode step beside weights and KV cache: launches, sampling, scheduling. Assumption."""
REDUCE_LATENCY = 15e-6
"""Seconds of one small all-reduce over NVLink; two a layer under tensor parallelism. Assumption."""


def decode_seconds(facts: RunFacts, cluster: Cluster, running: float, context: float) -> float:
    """One decode step of a server with ``running`` sequences of ``context`` tokens: max(bytes / memory rate, FLOPs /
    peak) + collectives + overhead. Bytes of a GPU: the weights that the batch touches, and the KV cache of all
    sequences.

    With p pipeline stages the batch is p parts, each in another stage, and every part passes all stages: p times what
    a stage, 1 / p of the layers, takes for a part and for handing it on. So weights are read p times.
    """
    shape, engine, device = facts.trainer.shape, facts.engine, cluster.device
    stages = engine.pipeline
    part = max(1.0, running / stages)
    touched = touched_parameters(shape, part) * 2 / engine.gpus
    cache = part * context * kv_bytes_per_token(shape, engine)
    memory = (touched + cache) / (device.hbm * HBM_EFFICIENCY)
    flops = part * (linear_flops(shape) + 2 * attention_flops(shape, context)) / engine.gpus
    compute = flops / (device.flops * PREFILL_UTILISATION)
    beside = DECODE_OVERHEAD + hand_over_seconds(shape, engine, cluster, part)
    reduce = 2 * shape.num_layers * REDUCE_LATENCY if engine.tensor > 1 else 0.0
    reduce += network_seconds(shape, engine, cluster, part, part)
    return stages * (max(memory, compute) + beside) + reduce


def touched_parameters(shape: ModelShape, running: float) -> float:
    """Weights that a batch of ``running`` tokens reads: with uniform routing 1 - (1 - k / E)^running of the experts."""
    if not shape.is_moe:
        return float(active_parameters(shape))
    expert = shape.num_layers * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense = active_parameters(shape) - expert * shape.experts_per_token
    share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return dense + expert * shape.num_experts * share


def generation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Seconds from the first prompt to the last response, over all servers.

    Bulk: sampled tokens of a server / sequences at once, each at the decode step of that batch and half of the mean
    length; prompts once a group (the prefix cache serves the rest). Tail: what the longest response needs beyond the
    mean one, with a tenth of the sequences.
    """
    rollout, engine, device = facts.rollout, facts.engine, cluster.device
    # Responses come from a file, or from servers that others started.
    if not engine.servers:
        return 0.0
    memory = engine_bytes(facts.trainer.shape, engine, rollout, device)
    waiting = rollout.responses / engine.servers
    leaders = facts.trainer.layout.data * rollout.max_concurrent / engine.servers
    running = max(1.0, min(waiting, memory.sequences, leaders))
    context = rollout.mean_prompt + rollout.mean_response / 2
    bulk = rollout.response_tokens / engine.servers / running
    bulk *= decode_seconds(facts, cluster, running, context)
    beyond = rollout.longest_response - rollout.mean_response
    tail = beyond * decode_seconds(facts, cluster, max(1.0, running / 10), rollout.longest_response)
    return bulk + prefill_seconds(facts, cluster) + tail


def evaluation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """One evaluation: generation of its responses, which are as long as training's unless its limit is lower."""
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
    return generation_seconds(replace(facts, rollout=rollout), cluster)


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


def step_seconds(facts: RunFacts, cluster: Cluster, traffic: Traffic) -> StepSeconds:
    """training = tokens x FLOPs of a token / (GPUs x peak x utilisation) x imbalance x (1 + bubble) + optimiser steps x
    overhead; a pass for recomputed or reference log-probabilities costs its forward FLOPs; checkpoints are spread
    over the steps between them."""
    trainer, rollout, device = facts.trainer, facts.rollout, cluster.device
    rate = trainer.layout.world_size * device.flops * _utilisation(trainer)
    slowed = UNBALANCED * (1 + bubble(trainer.layout, trainer.micro_batches))
    length, tokens = rollout.mean_length, rollout.tokens
    head = head_flops(trainer, rollout)
    train = tokens * (_training_flops(trainer, length) + head.training) / rate * slowed
    again = tokens * (forward_flops(trainer.shape, length) + head.forward) / rate * slowed
    return StepSeconds(
        generation=generation_seconds(facts, cluster),
        recompute_pass=again * (rollout.recompute_pass + trainer.reference),
        training=train + rollout.steps * OVERHEAD,
        communication=communication_seconds(facts, cluster),
        update=traffic.update_seconds if facts.engine.servers else 0.0,
        checkpoint=traffic.checkpoint_seconds / facts.checkpoint_every,
        overlapped=rollout.staleness > 0,
        evaluation=evaluation_seconds(facts, cluster),
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
        "prefill's share of peak FLOP/s": PREFILL_UTILISATION,
        "seconds of a decode step beside memory and FLOPs": DECODE_OVERHEAD,
        "seconds of a small all-reduce": REDUCE_LATENCY,
    }
