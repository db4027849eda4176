"""The exact plan of a weight update: its buckets, each rank's bytes, and a check that each element is sent once.

Beside it is the plan of an update in which every engine rank receives only what it keeps (``model.shard_plan``), the
strategy ``shards``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.cluster.planner.communicators import PER_COMMUNICATOR
from megatron_dppo.cluster.planner.devices import gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.model import gather_plan
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.quantization import stored_bytes
from megatron_dppo.model.resharding import check_sources
from megatron_dppo.model.shard_plan import ShardPlan, prove_shards, shard_plan

_COPIES = 2
"""Buffers for gathered buckets that a sender uses in turn (``checkpoint_conversion.gathering.Buffers``)."""

_SHARD_BYTES = 64 << 20
"""Largest message from shard to shard. Smaller messages are divided more evenly among the senders."""


@dataclass(frozen=True)
class WeightPlan:
    """The transfers of one weight update, in bytes.

    Attributes:
        ranks: Number of trainer ranks.
        tensors: Number of tensors.
        buckets: Number of buckets.
        weights: Bytes of all tensors.
        sent: Bytes that each sender sends to engines, by the sender's rank.
        gathered: Bytes that ranks exchange so that senders have whole tensors.
        gathered_bound: The fewest bytes that any choice of senders must gather.
        gathered_between_nodes: The bytes of ``gathered`` that leave a node.
        largest_bucket: Bytes of the largest bucket.
        sender_memory: Peak bytes of buckets on a sender: two gathered buckets, and the shards that it receives.
        engine_communicators: Bytes of NCCL's buffers on an engine GPU for the groups with senders.
        moved: Bytes that ranks exchange, and that all engine GPUs receive.
        kept: Bytes that all engine GPUs keep: the bound of ``moved``.
        shard_messages: Number of messages of an update in shards.
        shard_connections: Number of pairs of GPUs that exchange these messages.
        shard_sent: Bytes that the busiest trainer rank sends.
        shard_sent_mean: The mean of these bytes over the trainer ranks.
        shard_received: Bytes that the busiest engine rank receives.
        shard_steps: Sum over all steps of the bytes of the step's largest message. A port that receives at r bytes/s
            needs at most the sum / r seconds for all messages.
        problems: The reasons why the update would be incomplete or wrong, one line for each.
    """

    ranks: int
    tensors: int
    buckets: int
    weights: int
    sent: dict[int, int]
    gathered: int
    gathered_bound: int
    gathered_between_nodes: int
    largest_bucket: int
    sender_memory: int
    engine_communicators: int
    moved: int
    kept: int
    shard_messages: int
    shard_connections: int
    shard_sent: int
    shard_sent_mean: float
    shard_received: int
    shard_steps: int
    problems: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender / the mean over senders."""
        return max(self.sent.values()) * len(self.sent) / sum(self.sent.values())

    def lines(self) -> Iterator[str]:
        """Yield the plan as lines of text."""
        yield f"{self.ranks} ranks, {self.tensors} tensors of {gib(self.weights)} in {self.buckets} buckets"
        yield (
            f"senders: {len(self.sent)}, ranks {', '.join(map(str, sorted(self.sent)))}; the busiest sends "
            f"{self.imbalance:.2f} x the mean"
        )
        yield (
            f"gathered between ranks: {gib(self.gathered)} (fewest {gib(self.gathered_bound)}), between nodes "
            f"{gib(self.gathered_between_nodes)}"
        )
        yield (
            f"memory: {gib(self.sender_memory)} of buckets on a sender, {gib(self.engine_communicators)} of NCCL's "
            f"buffers on an engine GPU for {len(self.sent)} groups"
        )
        yield (
            f"engine GPUs: {gib(self.moved)} move, {gib(self.kept)} are kept: {self.moved / self.kept:.2f} x the bound"
        )
        yield (
            f"shard to shard (weight_sync.strategy shards): {self.shard_messages} messages between "
            f"{self.shard_connections} pairs of GPUs; the busiest trainer rank sends {gib(self.shard_sent)} "
            f"(mean {gib(self.shard_sent_mean)}), the busiest engine GPU receives {gib(self.shard_received)}; the "
            f"largest messages of all steps have {gib(self.shard_steps)}"
        )
        yield "\n".join(self.problems) or "every element is sent once"


def weight_plan(facts: RunFacts, ranks_per_node: int) -> WeightPlan:
    """Return the plan of a weight update of ``facts``, with ``ranks_per_node`` trainer ranks on each node."""
    trainer = facts.trainer
    item_bytes = facts.trainer.item_bytes
    buckets = gather_plan.hf_buckets_plan(
        trainer.shape,
        trainer.layout,
        facts.bucket_bytes,
        item_bytes,
        spread=True,
        ranks_per_node=facts.ranks_per_sender,
    )
    sent_bytes: Counter[int] = Counter()
    for bucket in buckets:
        # The rank that receives a bucket's shards sends the bucket to the engines.
        for tensor in bucket.tensors:
            sent_bytes[bucket.receiver] += stored_bytes(
                tensor.name, tensor.shape, item_bytes, quantized=facts.engine.is_quantized
            )
    tensors = 0
    gathered_elements = 0
    elements_between_nodes = 0
    largest_bucket = 0
    sender_elements = 0
    for bucket in buckets:
        # Count as if each node had one rank: all elements that the receiver does not hold then travel between nodes.
        received_elements = gather_plan.elements_between_nodes(bucket, 1)
        tensors += len(bucket.tensors)
        gathered_elements += received_elements
        elements_between_nodes += gather_plan.elements_between_nodes(bucket, ranks_per_node)
        largest_bucket = max(largest_bucket, bucket.elements)
        sender_elements = max(sender_elements, _COPIES * bucket.elements + received_elements)
    shards = _shard_plan(facts)
    weights = sum(sent_bytes.values())
    gathered = gathered_elements * item_bytes
    fewest_gathered = gather_plan.fewest_gathered_elements(trainer.shape, trainer.layout)
    return WeightPlan(
        ranks=trainer.layout.world_size,
        tensors=tensors,
        buckets=len(buckets),
        weights=weights,
        sent=dict(sent_bytes),
        gathered=gathered,
        gathered_bound=fewest_gathered * item_bytes,
        gathered_between_nodes=elements_between_nodes * item_bytes,
        largest_bucket=largest_bucket * item_bytes,
        sender_memory=sender_elements * item_bytes,
        engine_communicators=len(sent_bytes) * PER_COMMUNICATOR,
        moved=gathered + weights * len(shards.kept),
        kept=shards.bound,
        shard_messages=len(shards.messages),
        shard_connections=len(shards.connections),
        shard_sent=max(shards.sent.values()),
        shard_sent_mean=sum(shards.sent.values()) / trainer.layout.world_size,
        shard_received=max(shards.received.values()),
        shard_steps=sum(shards.step_bytes),
        problems=(*plan_faults(buckets), *_shard_faults(shards, facts)),
    )


def _shard_plan(facts: RunFacts) -> ShardPlan:
    return shard_plan(
        facts.trainer.shape,
        facts.trainer.layout,
        [facts.engine.layout] * facts.engine.started,
        min(facts.bucket_bytes, _SHARD_BYTES),
        facts.trainer.item_bytes,
        quantized=facts.engine.is_quantized,
    )


def _shard_faults(plan: ShardPlan, facts: RunFacts) -> Iterator[str]:
    """Report an element of an engine tensor that does not arrive exactly once."""
    engine = facts.engine
    servers = [engine.layout] * engine.started
    trainer = facts.trainer
    try:
        prove_shards(plan, trainer.shape, trainer.layout, servers, quantized=engine.is_quantized)
    except ProofError as error:
        yield str(error)


def plan_faults(buckets: Sequence[gather_plan.Bucket]) -> Iterator[str]:
    """Report tensors that are in two buckets, and elements that no rank or more than one rank sends."""
    counts: Counter[str] = Counter()
    for bucket in buckets:
        counts.update(tensor.name for tensor in bucket.tensors)
    for name, count in counts.items():
        if count > 1:
            yield f"{name} is in {count} buckets"
    for bucket in buckets:
        for tensor in bucket.tensors:
            try:
                check_sources(tensor)
            except ProofError as error:
                yield str(error)
