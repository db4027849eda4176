"""The exact plan of a weight update from shard to shard, and a check that each element arrives once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dppo.cluster.planner.devices import Cluster, gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.cluster.planner.traffic import servers_of_node
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.quantization import stored_bytes
from megatron_dppo.model.shard_plan import ShardPlan, prove_shards, shard_plan


@dataclass(frozen=True)
class WeightPlan:
    """The transfers of one weight update, in bytes.

    Attributes:
        ranks: Number of trainer ranks.
        tensors: Number of tensors of the model.
        weights: Bytes of all tensors.
        moved: Bytes that all engine GPUs receive.
        kept: Bytes that all engine GPUs keep: the bound of ``moved``.
        messages: Number of messages from trainer ranks.
        connections: Number of pairs of GPUs that exchange messages.
        sent: Bytes that the busiest trainer rank sends.
        sent_mean: The mean of these bytes over the trainer ranks.
        received: Bytes that the busiest engine GPU receives.
        received_mean: The mean of these bytes over the engine GPUs.
        steps: Sum over all steps of the bytes of the step's largest message that enters a node. A port that receives at
            r bytes/s needs at most the sum / r seconds for all messages.
        planning_s: CPU seconds of this machine for the plan. Every trainer and engine rank computes the plan.
        problems: The reasons why the update would be incomplete or wrong, one line for each.
    """

    ranks: int
    tensors: int
    weights: int
    moved: int
    kept: int
    messages: int
    connections: int
    sent: int
    sent_mean: float
    received: int
    received_mean: float
    steps: int
    planning_s: float
    problems: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the plan as lines of text."""
        yield f"{self.ranks} ranks, {self.tensors} tensors of {gib(self.weights)}"
        yield (
            f"engine GPUs: {gib(self.moved)} move, {gib(self.kept)} are kept: {self.moved / self.kept:.2f} x the bound"
        )
        yield (
            f"{self.messages} messages between {self.connections} pairs of GPUs; the largest that enter nodes, step by "
            f"step, have {gib(self.steps)}"
        )
        yield (
            f"the busiest trainer rank sends {gib(self.sent)} (mean {gib(self.sent_mean)}), the busiest engine GPU "
            f"receives {gib(self.received)} (mean {gib(self.received_mean)})"
        )
        yield (
            f"every rank plans the first update, and the next one when the servers have changed: {self.planning_s:.1f} "
            "CPU s on this machine"
        )
        yield "\n".join(self.problems) or "every element arrives once"


def weight_plan(facts: RunFacts, cluster: Cluster) -> WeightPlan:
    """Return the plan of a weight update of ``facts`` from shard to shard."""
    trainer = facts.trainer
    engine = facts.engine
    tensor = engine.layout.tensor
    servers = range(engine.started)
    hosts = [server // servers_of_node(facts, cluster) for server in servers]
    start_s = time.process_time()
    plan = shard_plan(
        trainer.shape,
        trainer.layout,
        [engine.layout] * engine.started,
        facts.config.weight_sync.message_bytes(tensor, len(set(hosts))),
        trainer.item_bytes,
        quantized=engine.is_quantized,
        hosts=hosts,
    )
    planning_s = time.process_time() - start_s
    tensors = hf_tensors(trainer.shape)
    weights = 0
    for name, dims in tensors.items():
        weights += stored_bytes(name, dims, trainer.item_bytes, quantized=engine.is_quantized)
    return WeightPlan(
        ranks=trainer.layout.world_size,
        tensors=len(tensors),
        weights=weights,
        moved=sum(plan.received.values()),
        kept=plan.bound,
        messages=len(plan.messages),
        connections=len(plan.connections),
        sent=max(plan.sent.values()),
        sent_mean=sum(plan.sent.values()) / trainer.layout.world_size,
        received=max(plan.received.values()),
        received_mean=sum(plan.received.values()) / len(plan.kept),
        steps=sum(plan.step_bytes),
        planning_s=planning_s,
        problems=tuple(_faults(plan, facts)),
    )


def _faults(plan: ShardPlan, facts: RunFacts) -> Iterator[str]:
    """Report an element of an engine tensor that does not arrive exactly once."""
    engine = facts.engine
    servers = [engine.layout] * engine.started
    trainer = facts.trainer
    try:
        prove_shards(plan, trainer.shape, trainer.layout, servers, quantized=engine.is_quantized)
    except ProofError as error:
        yield str(error)
