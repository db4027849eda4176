"""Predict the seconds of a step from FLOPs and bandwidths; this file names every assumption of the model.

Generation follows a roofline of memory bandwidth and FLOPs, plus the tail of the longest response.
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
    """Return the FLOPs of one token's forward pass in matrix products: twice the weights that multiply the token."""
    return model_flops(shape).linear


def attention_flops(shape: ModelShape, length: float) -> float:
    """Return attention's FLOPs in one token's forward pass, averaged over a causal sequence of ``length`` tokens."""
    return model_flops(shape).quadratic * length


def forward_flops(shape: ModelShape, length: float) -> float:
    """Return the FLOPs of the forward pass of one token in a sequence of ``length`` tokens."""
    return linear_flops(shape) + attention_flops(shape, length)


# Network time of a server that spans several nodes: the collectives of tensor parallelism in a
# forward pass, and the hidden states that one pipeline stage sends to the next.

_ITEM = 2


def network_seconds(
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float, sampled: float
) -> float:
    """Return the seconds of the collectives between nodes in one forward pass over ``tokens`` tokens.

    ``sampled`` of the tokens get logits. The result is 0 where a tensor parallel group is inside a node.

    SGLang all-reduces hidden states (bf16) after the embedding and twice in each layer, and gathers the logits; NCCL
    does both across nodes. NCCL models a collective (``src/graph/tuning.cc``) as latency + bytes / rate. With n GPUs on
    h nodes, the latency of each collective is 2 ceil(log2 h) x the network's latency (up and down a tree). Between
    nodes travel 2 (n - 1) / n of an all-reduce's bytes and (n - 1) / n of a gather's bytes, through the ports of all
    n / h GPUs of a node at once.
    """
    size, nodes = engine.tensor, ceil(engine.tensor / cluster.gpus_per_node)
    if nodes == 1:
        return 0.0
    reductions = 2 * shape.num_layers + 1
    reduction_bytes = reductions * tokens * shape.hidden_size * _ITEM
    gather_bytes = sampled * shape.vocab_size * _ITEM
    network_bytes = (2 * reduction_bytes + gather_bytes) * (size - 1) / size
    rate = size / nodes * cluster.device.network * LINK_EFFICIENCY
    latency = 2 * ceil(log2(nodes)) * cluster.network_latency
    return (reductions + 1) * latency + network_bytes / rate


def hand_over_seconds(
    shape: ModelShape, engine: EngineFacts, cluster: Cluster, tokens: float
) -> float:
    """Return the seconds in which a pipeline stage sends ``tokens`` hidden states (bf16) to a stage on another node.

    Each GPU of the stage sends its part through a port of its own: latency + bytes / rate. The result is 0 where all
    stages are on one node.
    """
    if engine.pipeline == 1 or engine.gpus <= cluster.gpus_per_node:
        return 0.0
    bytes_per_gpu = tokens * shape.hidden_size * _ITEM / engine.tensor
    return cluster.network_latency + bytes_per_gpu / (cluster.device.network * LINK_EFFICIENCY)


# One decode step.

HBM_EFFICIENCY = 0.7
"""Share of the memory's rate at which decoding reads dense weights and KV cache. Published runs of dense models agree
with the value (docs/evidence/scale.md)."""
EXPERT_EFFICIENCY = 0.55
"""The same share for experts' weights, each of which serves only a few tokens. Set from published runs
(docs/evidence/scale.md)."""
PREFILL_UTILISATION = 0.4
"""Share of peak FLOP/s in prefill and in large decode batches. Assumption."""
DECODE_OVERHEAD = 0.004
"""Seconds that each decode step adds to the time of weights and KV cache: launches, sampling, scheduling.
Assumption."""
SEQUENCE_OVERHEAD = 10e-6
"""Seconds that each sequence adds to a decode step: sampling, its log-probability, scheduling, detokenizing. Set from
published runs (docs/evidence/scale.md)."""
REDUCE_LATENCY = 15e-6
"""Seconds that each all-reduce over NVLink adds to the time of its bytes. Assumption."""


def decode_seconds(facts: RunFacts, cluster: Cluster, running: float, context: float) -> float:
    """Return the seconds of one decode step of a server with ``running`` sequences of ``context`` tokens.

    The formula is max(bytes / memory rate, FLOPs / peak) + collectives + an overhead of the step + an overhead of each
    sequence. A GPU reads the weights that the batch touches and the KV cache of all sequences.

    With p pipeline stages, the batch is split into p parts, each of them in another stage, and each part passes all
    stages. A step then takes p x the seconds in which one stage (1 / p of the layers) computes one part and sends its
    hidden states to the next stage, and the weights are read p times.
    """
    shape, engine, device = facts.trainer.shape, facts.engine, cluster.device
    stages = engine.pipeline
    part = max(1.0, running / stages)
    touched = touched_parameters(shape, part)
    cache = part * context * kv_bytes_per_token(shape, engine)
    read_seconds = (touched.dense * _ITEM / engine.gpus + cache) / (device.hbm * HBM_EFFICIENCY)
    read_seconds += touched.experts * _ITEM / engine.gpus / (device.hbm * EXPERT_EFFICIENCY)
    flops = part * (linear_flops(shape) + 2 * attention_flops(shape, context)) / engine.gpus
    math_seconds = flops / (device.flops * PREFILL_UTILISATION)
    overhead = DECODE_OVERHEAD + hand_over_seconds(shape, engine, cluster, part)
    collectives = reduce_seconds(shape, engine, device, part)
    collectives += network_seconds(shape, engine, cluster, part, part)
    return (
        stages * (max(read_seconds, math_seconds) + overhead)
        + running * SEQUENCE_OVERHEAD
        + collectives
    )


def reduce_seconds(shape: ModelShape, engine: EngineFacts, device: Device, tokens: float) -> float:
    """Return the seconds of the all-reduces within a node in one forward pass.

    Each layer has two all-reduces, and each takes its latency and the time in which 2 (n - 1) / n of the hidden states'
    bytes (bf16) cross NVLink.
    """
    size = engine.tensor
    if size == 1:
        return 0.0
    nvlink_bytes = 2 * (size - 1) / size * tokens * shape.hidden_size * _ITEM
    seconds = REDUCE_LATENCY + nvlink_bytes / (device.nvlink * LINK_EFFICIENCY)
    return 2 * shape.num_layers * seconds


@dataclass(frozen=True)
class Touched:
    """The numbers of weights that a decode step reads."""

    dense: float
    experts: float


def touched_parameters(shape: ModelShape, running: float) -> Touched:
    """Return the numbers of weights that a batch of ``running`` tokens reads.

    With uniform routing, the batch reads the share 1 - (1 - k / E)^running of the experts' weights, for k of E experts
    per token.
    """
    if not shape.is_moe:
        return Touched(float(active_parameters(shape)), 0.0)
    expert_size = shape.num_layers * 3.0 * shape.hidden_size * shape.moe_ffn_hidden_size
    dense_size = active_parameters(shape) - expert_size * shape.experts_per_token
    read_share = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
    return Touched(dense_size, expert_size * shape.num_experts * read_share)


# A rollout batch.


@dataclass(frozen=True)
class GenerationSeconds:
    """Seconds in which all servers generate a rollout batch.

    ``steady``: seconds in which the servers are full. ``tail``: seconds in which only a few of the longest responses
    run, and the next batch must not begin. ``mean_response``: seconds of a response of mean length on a full server.
    ``last_response``: seconds of the longest response that starts when the queue is empty.
    """

    steady: float
    tail: float
    mean_response: float = 0.0
    last_response: float = 0.0

    @property
    def total(self) -> float:
        return self.steady + self.tail


def generation_seconds(facts: RunFacts, cluster: Cluster) -> GenerationSeconds:
    """Return the seconds in which the servers generate a rollout batch under the run's schedule.

    Where each step waits for all of its responses, the seconds count from the first prompt to the last response.
    steady = (sampled tokens of a server / sequences at once) x the decode step of that many sequences at half of the
    mean response, plus one prefill of each group's prompt (the prefix cache serves the other responses). tail = the
    seconds that the longest response takes beyond the mean one, with a tenth of the sequences.

    Where responses continue after a weight update, there is no tail, but each update prefills the running sequences
    again. The cost of the longest response then depends on the trainer, too: see ``StepSeconds.decoding``.
    """
    rollout, schedule = facts.rollout, facts.schedule
    # The run starts no server: responses are read from a file, or attached servers generate them.
    if not facts.engine.servers:
        return GenerationSeconds(0.0, 0.0)
    running = sequences_at_once(facts, cluster)
    context = rollout.mean_prompt + rollout.mean_response / 2
    step = decode_seconds(facts, cluster, running, context)
    steady = rollout.response_tokens / facts.engine.servers / running * step
    steady += prefill_seconds(facts, cluster)
    mean_tokens, longest_tokens = rollout.mean_response, rollout.longest_response
    tail = (longest_tokens - mean_tokens) * decode_seconds(
        facts, cluster, max(1.0, running / 10), longest_tokens
    )
    if schedule.drains:
        return GenerationSeconds(steady, tail, mean_tokens * step, mean_tokens * step + tail)
    steady += resumed_seconds(facts, cluster, running)
    return GenerationSeconds(steady, 0.0, mean_tokens * step, mean_tokens * step + tail)


def sequences_at_once(facts: RunFacts, cluster: Cluster) -> float:
    """Return the sequences that a server runs at once: its share of the queue, or its slots where these are fewer."""
    rollout = facts.rollout
    batches_ahead = 1 if facts.schedule.drains else max(1, facts.schedule.staleness)
    queue_share = batches_ahead * rollout.responses / facts.engine.servers
    return max(1.0, min(queue_share, server_slots(facts, cluster)))


def server_slots(facts: RunFacts, cluster: Cluster) -> float:
    """Return a server's slots: the smaller of the sequences in its KV cache and its share of concurrent requests."""
    rollout, engine = facts.rollout, facts.engine
    memory = engine_bytes(facts.trainer.shape, engine, rollout, cluster.device)
    requests = facts.trainer.layout.data * rollout.max_concurrent / engine.servers
    return min(memory.sequences, requests)


def resumed_seconds(facts: RunFacts, cluster: Cluster, running: float) -> float:
    """Return the seconds in which a server prefills its ``running`` sequences again after a weight update.

    Each sequence has its prompt and, on average, half of a mean response.
    """
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    length = rollout.mean_prompt + rollout.mean_response / 2
    flops = running * length * forward_flops(shape, length)
    return flops / (engine.gpus * cluster.device.flops * PREFILL_UTILISATION)


def evaluation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds of one evaluation: its responses are as long as training's unless its limit is lower."""
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
    evaluation_facts = replace(
        facts, rollout=rollout, schedule=replace(facts.schedule, drains=True)
    )
    return generation_seconds(evaluation_facts, cluster).total


def prefill_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds in which the servers prefill each prompt of a rollout batch once.

    The formula is FLOPs / (peak x utilisation) + the network time of the passes, each over one chunk of prompts. With p
    pipeline stages, p - 1 more passes fill and drain the pipeline.
    """
    shape, rollout, engine = facts.trainer.shape, facts.rollout, facts.engine
    tokens = rollout.prompts * rollout.mean_prompt / engine.servers
    seconds = tokens * linear_flops(shape)
    seconds /= engine.gpus * cluster.device.flops * PREFILL_UTILISATION
    passes = ceil(tokens / chunk_tokens(engine, cluster.device))
    prompts = rollout.prompts / engine.servers
    chunk, stages = tokens / passes, engine.pipeline
    network = network_seconds(shape, engine, cluster, chunk, prompts / passes) / stages
    network += hand_over_seconds(shape, engine, cluster, chunk)
    return (seconds / passes + network) * (passes + stages - 1)


# A step.

DENSE_UTILISATION = 0.5
"""Share of a GPU's peak that the forward and backward passes of dense layers reach, without collectives. Set from
published runs (docs/evidence/scale.md)."""
MOE_UTILISATION = 0.13
"""The same share for fine-grained experts in RL. Tuned pretraining with balanced experts reaches more than twice as
much."""
UNBALANCED = 1.1
"""Time of the slowest replica over the replicas' mean in an optimiser step; sequences are distributed by predicted cost
(data/balancing.py). Assumption."""
OVERHEAD = 0.5
"""Seconds that an optimiser step adds to its passes: optimizer, reductions, launches. Assumption."""

_BACKWARD = {"none": 3.0, "selective": 3.0, "full": 4.0}
"""Cost of training the linear layers, in forward passes: 1 for forward, 2 for backward, and 1 more under full
recomputation."""
_ATTENTION = {"none": 3.5, "selective": 4.5, "full": 4.5}
"""The same cost for flash attention, whose backward pass costs 2.5 forward passes (Dao, arXiv 2307.08691, section
4.1)."""


def training_flops(shape: ModelShape, length: float, recompute: str) -> float:
    """Return the FLOPs of one token's forward and backward pass under ``training.recompute`` = ``recompute``."""
    linear, attention = linear_flops(shape), attention_flops(shape, length)
    return _BACKWARD[recompute] * linear + _ATTENTION[recompute] * attention


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step's phases.

    ``generation``: seconds in which the servers are full; ``tail``: seconds in which the last responses end.
    ``switch``: seconds in which shared GPUs change between trainer and servers. ``evaluation``: seconds of one
    evaluation / the steps between two. ``mean_response``, ``last_response``: as in ``GenerationSeconds``.
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
        """Seconds by the phase's name, without the phases that this schedule or algorithm does not have."""
        phases = {
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
        return {name: seconds for name, seconds in phases.items() if seconds}

    @property
    def trainer(self) -> float:
        """Seconds in which the trainer's GPUs work on the batch."""
        return self.recompute_pass + self.training + self.communication

    @property
    def servers(self) -> float:
        """Seconds in which the servers generate the batch."""
        return self.generation + self.tail

    @property
    def total(self) -> float:
        """Seconds of a step: servers, then trainer, then the phases that all GPUs wait for.

        Where training and generation overlap, the longer of the two replaces their sum.
        """
        blocking = self.switch + self.update + self.checkpoint
        if self.schedule.overlaps:
            return max(self.decoding, self.trainer) + blocking
        return self.decoding + self.trainer + blocking

    @property
    def decoding(self) -> float:
        """Seconds of a step in which servers generate, or wait for the next batch while the last responses end.

        Where a weight update interrupts responses, a batch begins with an update and must end before its training
        begins, e steps later (e: staleness). Let d be the seconds that this property returns, l the seconds of the
        last response, and R the trainer's seconds that overlap with generation. The last prompts of the batch must
        leave the queue by (e + 1) d - R - l, and the next batch begins at d. During the x = l + R - e d seconds
        between these two times the servers drain. The running responses end at a constant rate, within the m seconds
        of a mean response. The servers lose lost(x) = x^2 / 2m seconds where x <= m, and x - m / 2 otherwise. So
        d = servers + lost(x), and d >= (l + R) / (e + 1), the bound where all responses of a batch run at once.
        """
        servers, staleness = self.servers + self.evaluation, self.schedule.staleness
        if self.schedule.drains:
            return servers
        window = self.last_response + (self.trainer if self.schedule.overlaps else 0.0)
        return max(servers + self._starved(servers, window), window / (staleness + 1))

    def _starved(self, servers: float, window: float) -> float:
        """Solve y = lost(x), where x = ``window`` - e (``servers`` + y), for y: the seconds that servers lose.

        e is the staleness and m the seconds of a mean response.
        """
        m, e = self.mean_response, self.schedule.staleness
        largest_x = window - e * servers
        if largest_x <= 0:
            return 0.0
        # Solve x^2 / 2m = (largest_x - x) / e.
        x = sqrt((m / e) ** 2 + 2 * m * largest_x / e) - m / e
        if x > m:
            # Solve x - m / 2 = (largest_x - x) / e.
            x = (largest_x / e + m / 2) / (1 + 1 / e)
        return (largest_x - x) / e

    @property
    def idle(self) -> dict[str, float]:
        """The share of a step in which GPUs wait, by role.

        All GPUs work during a weight update. Servers count as waiting while only the last responses run, and shared
        GPUs while they change between trainer and servers.
        """
        trainers = self.trainer + self.update + self.checkpoint
        servers = self.generation + self.evaluation
        if self.schedule.is_colocated:
            return {"GPUs": 1 - (trainers + servers) / self.total}
        return {
            "trainers": 1 - trainers / self.total,
            "servers": 1 - (servers + self.update) / self.total,
        }

    def gpu_idle(self, trainers: int, servers: int) -> float:
        """Return the share of all GPUs' time that is spent waiting; ``trainers``, ``servers``: GPUs of each role."""
        if self.schedule.is_colocated:
            return self.idle["GPUs"]
        idle_gpus = trainers * self.idle["trainers"] + servers * self.idle["servers"]
        return idle_gpus / (trainers + servers)


def step_seconds(facts: RunFacts, cluster: Cluster, traffic: Traffic) -> StepSeconds:
    """Return the seconds of each phase of a step.

    training = tokens x FLOPs of a token / (GPUs x peak x utilisation) x imbalance x (1 + bubble) + optimiser steps x
    overhead. A pass for recomputed or reference log-probabilities costs its forward FLOPs. The seconds of a checkpoint
    and of an evaluation are divided by the steps between two of them.
    """
    trainer, rollout, device = facts.trainer, facts.rollout, cluster.device
    rate = trainer.layout.world_size * device.flops * _utilisation(trainer)
    slowdown = UNBALANCED * (1 + bubble(trainer.layout, trainer.micro_batches))
    length, tokens = rollout.mean_length, rollout.tokens
    head = head_flops(trainer, rollout)
    training_pass = tokens * (_training_flops(trainer, length) + head.training) / rate * slowdown
    forward_pass = tokens * (forward_flops(trainer.shape, length) + head.forward) / rate * slowdown
    generation = generation_seconds(facts, cluster)
    evaluation = evaluation_seconds(facts, cluster)
    return StepSeconds(
        schedule=facts.schedule,
        generation=generation.steady,
        tail=generation.tail,
        recompute_pass=forward_pass * (rollout.recompute_pass + trainer.reference),
        training=training_pass + rollout.steps * OVERHEAD,
        communication=communication_seconds(facts, cluster),
        switch=switch_seconds(facts, cluster.device),
        update=traffic.update_seconds if facts.engine.servers else 0.0,
        checkpoint=traffic.checkpoint_seconds / facts.checkpoint_every,
        evaluation=evaluation / facts.evaluation.every if facts.evaluation is not None else 0.0,
        mean_response=generation.mean_response,
        last_response=generation.last_response,
    )


@dataclass(frozen=True)
class HeadFlops:
    """FLOPs of a token in the output layer, minus the FLOPs of an output layer that computes all tokens.

    The difference is negative where the output layer skips the prompts.
    """

    forward: float
    training: float


def head_flops(trainer: TrainerFacts, rollout: RolloutFacts) -> HeadFlops:
    """Return the output layer's FLOPs, averaged over the tokens of a sequence.

    The output layer computes only responses (``vocab_parallel/head.py``). One matrix product costs 2 x hidden x
    vocabulary FLOPs a token. Training needs three products, or two where the layer is frozen, and one more for the
    logits of all chunks of a micro-batch but the last, which are computed again. Rows without a gradient count like the
    others.
    """
    product = 2.0 * trainer.shape.hidden_size * trainer.shape.vocab_size
    share = rollout.mean_response / rollout.mean_length
    products = 3 if trainer.trained is None else 2
    response_tokens = max(share * trainer.tokens, 1.0)
    recomputed_share = share * max(0.0, 1 - trainer.chunk_tokens / response_tokens)
    return HeadFlops(product * (share - 1), product * (products * (share - 1) + recomputed_share))


def _training_flops(trainer: TrainerFacts, length: float) -> float:
    """Return the FLOPs of training on one token.

    Frozen linear layers need no product for the gradients of their weights; the FLOPs of adapters are not counted.
    """
    full_flops = training_flops(trainer.shape, length, trainer.recompute)
    return full_flops if trainer.trained is None else full_flops - linear_flops(trainer.shape)


def _utilisation(trainer: TrainerFacts) -> float:
    return MOE_UTILISATION if trainer.shape.is_moe else DENSE_UTILISATION


def communication_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds of the collectives in all passes of a step, without any overlap.

    - Tensor parallelism: a layer's forward pass has 2 gathers and 2 scatters (or 2 all-reduces) of tokens x hidden, the
      backward pass has the same, and full recomputation repeats the forward pass. (TP - 1) / TP of the bytes leave a
      rank.
    - Context parallelism, in each layer: in a ring, each of C ranks sends its tokens' keys and values C - 1 times in a
      forward pass, and these and their gradients in the backward pass. An all-to-all sends queries, keys, values and
      outputs, or their gradients, of which (C - 1) / C leave a rank. Transformer Engine hides most of a ring behind
      attention's arithmetic; the formula ignores that.
    - Expert parallelism: each pass sends the hidden state of each (token, expert) pair to the expert and back;
      (EP - 1) / EP of them leave a rank.
    - Replicas and context-parallel ranks: an optimiser step reduces fp32 gradients and gathers weights once.

    A group that spans nodes communicates at the network's rate, any other group at NVLink's.
    """
    trainer, layout, shape = facts.trainer, facts.trainer.layout, facts.trainer.shape
    device, node = cluster.device, cluster.gpus_per_node
    passes = 3 if trainer.recompute == "full" else 2
    tokens = facts.rollout.tokens / (layout.data * layout.context)  # tokens of one rank
    layers = shape.num_layers / layout.pipeline
    hidden = tokens * shape.hidden_size * trainer.item_bytes * layers * passes
    tensor = 4 * hidden * (layout.tensor - 1) / layout.tensor / _link(device, layout.tensor <= node)
    expert = 0.0
    if layout.expert > 1:
        routed_bytes = 2 * hidden * shape.experts_per_token / layout.tensor * layout.expert_tensor
        is_inside_a_node = layout.expert * layout.expert_tensor <= node
        expert = (
            routed_bytes * (layout.expert - 1) / layout.expert / _link(device, is_inside_a_node)
        )
    context = (
        tokens
        * layers
        * context_bytes(trainer)
        / _link(device, layout.tensor * layout.context <= node)
    )
    return tensor + context + expert + _replica_seconds(facts, cluster)


def context_bytes(trainer: TrainerFacts) -> float:
    """Return the bytes that a rank sends to context-parallel ranks for each of its tokens in all passes of a layer."""
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
    step_bytes = parameters.elements * (4 + facts.trainer.item_bytes)
    is_inside_a_node = layout.stage_ranks <= cluster.gpus_per_node
    return facts.rollout.steps * step_bytes / _link(cluster.device, is_inside_a_node)


def _link(device: Device, inside_a_node: bool) -> float:
    return LINK_EFFICIENCY * (device.nvlink if inside_a_node else device.network)


def model_flops_utilisation(facts: RunFacts, seconds: StepSeconds, cluster: Cluster) -> float:
    """Return the trainer's MFU: FLOPs without recomputation / (peak of the trainer's GPUs x seconds of training).

    The FLOPs are 6 x active parameters x tokens, plus those of attention.
    """
    shape, rollout = facts.trainer.shape, facts.rollout
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
        "of each of its sequences": SEQUENCE_OVERHEAD,
        "seconds of a small all-reduce": REDUCE_LATENCY,
    }
