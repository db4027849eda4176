"""Seconds of a rollout batch and of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from megatron_dppo.cluster.planner.decode_time import (
    PREFILL_UTILISATION,
    decode_seconds,
    network_seconds,
)
from megatron_dppo.cluster.planner.devices import Cluster
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.cluster.planner.server_memory import chunk_tokens, engine_bytes
from megatron_dppo.model.shape import forward_flops
from megatron_dppo.spec import ServersSpec


@dataclass(frozen=True)
class GenerationSeconds:
    """Seconds in which all servers generate a rollout batch.

    Attributes:
        steady: seconds in which the servers are full.
        tail: seconds in which only a few of the longest responses still run. The next batch waits for their end.
        mean_response: seconds of a response of mean length on a full server.
        last_response: seconds of the longest response if it starts when the queue becomes empty.
    """

    steady: float
    tail: float
    mean_response: float = 0.0
    last_response: float = 0.0

    @property
    def total(self) -> float:
        """Seconds from the first prompt to the last response."""
        return self.steady + self.tail


def generation_seconds(facts: RunFacts, cluster: Cluster) -> GenerationSeconds:
    """Return the seconds in which the servers generate a rollout batch under the run's schedule.

    If each step waits for all of its responses, the seconds count from the first prompt to the last response:

    - steady = (sampled tokens of a server / sequences at once) x seconds of a decode step + seconds of the prefill. In
      the decode step, each sequence has its prompt and half of a mean response. The prefill computes each
      group's prompt once in each attention replica: the prefix cache serves the replica's other responses.
    - tail = (tokens of the longest response - tokens of the mean response) x seconds of a decode step with a tenth of
      the sequences.

    If responses continue after a weight update, there is no tail, but each update prefills the running sequences again.
    The cost of the longest response then also depends on the trainer: see ``StepSeconds.decoding``.
    """
    rollout = facts.rollout
    if not facts.engine.started:
        # The responses come from a file, or from attached servers of unknown speed.
        return GenerationSeconds(0.0, 0.0)
    running = sequences_at_once(facts, cluster)
    context = rollout.mean_prompt + rollout.mean_response / 2
    step = decode_seconds(facts, cluster, running, context)
    steady = rollout.response_tokens / facts.engine.started / running * step
    steady += prefill_seconds(facts, cluster)
    longest_tokens = rollout.longest_response
    last_running = max(1.0, running / 10)
    last_step = decode_seconds(facts, cluster, last_running, longest_tokens)
    tail = (longest_tokens - rollout.mean_response) * last_step
    mean_response = rollout.mean_response * step
    # On a full server, the longest response samples as many tokens as a mean response. It samples its other tokens in
    # the tail.
    last_response = mean_response + tail
    if not facts.schedule.drains:
        steady += resumed_seconds(facts, cluster, running)
        tail = 0.0
    return GenerationSeconds(steady, tail, mean_response, last_response)


def teacher_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds in which the slowest teacher scores a rollout batch; 0 without started teachers' servers.

    A response costs one prefill over prompt and response, with the logits of all its tokens; the prefix cache is not
    counted. The formula is FLOPs / (GPUs of the teacher's servers x peak x utilisation) + the network time of the
    passes, with the FLOPs of the teacher's active parameters. Several teachers are assumed to share the problems
    equally. Attached servers are of unknown speed: a teacher that has some counts 0.
    """
    rollout = facts.rollout
    teachers = facts.spec.teachers
    slowest = 0.0
    for teacher in teachers:
        servers = teacher.servers
        if not servers.started or servers.urls:
            continue
        shape = teacher.model.shape
        server_tokens = rollout.tokens / len(teachers) / servers.started
        math_seconds = server_tokens * forward_flops(shape).of_token(rollout.mean_length)
        math_seconds /= prefill_rate(servers, cluster)
        passes = ceil(server_tokens / chunk_tokens(servers, cluster.device))
        chunk = server_tokens / passes
        scored = chunk * rollout.mean_response / rollout.mean_length
        network = network_seconds(shape, servers, cluster, chunk, scored)
        slowest = max(slowest, math_seconds + network * passes)
    return slowest


def sequences_at_once(facts: RunFacts, cluster: Cluster) -> float:
    """Return the sequences that a server runs at once: the smaller of its share of the queue and its slots."""
    rollout = facts.rollout
    queued_batches = 1
    if not facts.schedule.drains:
        # Responses continue after a weight update, so the queue also has the prompts of later batches.
        queued_batches = max(1, facts.schedule.staleness)
    queue_share = queued_batches * rollout.responses / facts.engine.started
    return max(1.0, min(queue_share, server_slots(facts, cluster)))


def server_slots(facts: RunFacts, cluster: Cluster) -> float:
    """Return a server's slots: the smaller of the sequences that fit its KV cache and its share of open requests."""
    rollout = facts.rollout
    engine = facts.engine
    memory = engine_bytes(facts.trainer.shape, engine, rollout, cluster.device)
    requests = (
        facts.trainer.layout.data * facts.config.rollout.max_concurrent_requests / engine.started
    )
    return min(memory.sequences, requests)


def resumed_seconds(facts: RunFacts, cluster: Cluster, running: float) -> float:
    """Return the seconds in which a server prefills its ``running`` sequences again after a weight update.

    Each sequence has its prompt and, on average, half of a mean response.
    """
    shape = facts.trainer.shape
    rollout = facts.rollout
    engine = facts.engine
    length = rollout.mean_prompt + rollout.mean_response / 2
    flops = running * length * forward_flops(shape).of_token(length)
    return flops / prefill_rate(engine, cluster)


def evaluation_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds of one evaluation; 0 for a run without evaluations.

    The mean response is assumed to be as long as in training, at most the evaluation's limit.
    """
    if not facts.evaluated_problems:
        return 0.0
    longest_response = facts.rollout.longest_evaluated
    rollout = replace(
        facts.rollout,
        prompts=facts.evaluated_problems,
        group_size=facts.config.evaluation.samples_per_prompt,
        longest_response=longest_response,
        mean_response=min(facts.rollout.mean_response, longest_response),
    )
    evaluation_facts = replace(
        facts, rollout=rollout, schedule=replace(facts.schedule, drains=True)
    )
    return generation_seconds(evaluation_facts, cluster).total


def prefill_rate(engine: ServersSpec, cluster: Cluster) -> float:
    """Return the FLOP/s that a server reaches in prefill."""
    return engine.layout.tensor * cluster.device.flops * PREFILL_UTILISATION


def prefill_seconds(facts: RunFacts, cluster: Cluster) -> float:
    """Return the seconds in which the servers prefill the prompts of a rollout batch.

    Each attention replica that has a response of a group prefills the group's prompt once.
    The formula is FLOPs / (peak x utilisation) + the network time of the passes. A pass computes one chunk of prompts.
    """
    shape = facts.trainer.shape
    rollout = facts.rollout
    engine = facts.engine
    prefills = rollout.prompts * min(engine.layout.attention_replicas, rollout.group_size)
    server_prompts = prefills / engine.started
    server_tokens = server_prompts * rollout.mean_prompt
    math_seconds = server_tokens * forward_flops(shape).linear
    math_seconds /= prefill_rate(engine, cluster)
    passes = ceil(server_tokens / chunk_tokens(engine, cluster.device))
    chunk = server_tokens / passes
    # A prefill computes logits only for the last token of each prompt.
    sampled_tokens = server_prompts / passes
    network = network_seconds(shape, engine, cluster, chunk, sampled_tokens)
    return math_seconds + network * passes
