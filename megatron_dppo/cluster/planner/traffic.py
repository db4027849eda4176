"""Bytes and seconds of a weight update and of a checkpoint; the update's own plan of buckets, for every rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.cluster.planner.devices import GB, Device, gib
from megatron_dppo.cluster.planner.facts import RunFacts
from megatron_dppo.cluster.planner.memory import PER_COMMUNICATOR
from megatron_dppo.model import gather_plan
from megatron_dppo.model.errors import ProofError
from megatron_dppo.model.mapping import parameters
from megatron_dppo.model.resharding import check_sources
from megatron_dppo.model.shape import checkpoint_bytes

# Bytes and seconds of a weight update and of a checkpoint, at stated bandwidths.

BROADCAST_EFFICIENCY = 0.6
"""Share of a network port's rate that a broadcast of large buckets reaches. Assumption."""
BUCKET_LATENCY = 0.02
"""Seconds of HTTP, hashing and loading for each bucket that do not overlap. Assumption."""
FIXED_UPDATE = 1.0
"""Seconds to drain, to compare canaries and to commit. Assumption."""
STORAGE = 5 * GB
"""Bytes/s at which all writers together reach a shared file system. Assumption; ``--storage-gbps`` replaces it."""


@dataclass(frozen=True)
class Traffic:
    """``update``: bytes of a weight update, which every engine GPU receives whole. ``gathered``: of them, what moves
    between trainer ranks first, at most. ``checkpoint``: bytes of weights and optimizer state."""

    update: int
    gathered: int
    buckets: int
    update_seconds: float
    checkpoint: int
    checkpoint_seconds: float


def traffic(facts: RunFacts, device: Device, storage: float = STORAGE) -> Traffic:
    """Update: every engine GPU receives all weights; senders broadcast in turn, so seconds = bytes / (a network port's
    rate x efficiency) + buckets x latency + a fixed part. Servers on the ranks' own
    GPUs, that need no port, are counted alike. Gathered first, within nodes where one rank of each sends:
    all but the sender's own shards; a holder has whole experts with expert tensor parallelism 1. Adapters alone are
    gathered on one rank, written and read: seconds = 2 x bytes / the storage's rate + the fixed part.

    Checkpoint: elements x (2 + 12) for bfloat16 (weights, fp32 master, two moments), x (4 + 8) for float32, over the
    storage's bytes/s; with adapters, of them alone.
    """
    trainer = facts.trainer
    count = parameters(trainer.shape)
    stored = count if trainer.trained is None else trainer.trained.elements(trainer.shape)
    state = checkpoint_bytes(stored, trainer.dtype)
    if facts.updates_adapters:
        sent = gathered = stored * trainer.item_bytes
        buckets, wire = 1, 2 * sent / storage
    else:
        sent, gathered = count * trainer.item_bytes, _gathered(facts)
        buckets = facts.senders * math.ceil(sent / facts.senders / facts.bucket_bytes)
        wire = sent / (device.network * BROADCAST_EFFICIENCY) + buckets * BUCKET_LATENCY
    return Traffic(
        update=sent,
        gathered=gathered,
        buckets=buckets,
        update_seconds=wire + FIXED_UPDATE,
        checkpoint=state,
        checkpoint_seconds=state / storage,
    )


def _gathered(facts: RunFacts) -> int:
    """Bytes of all weights that move between trainer ranks."""
    shape, layout = facts.trainer.shape, facts.trainer.layout
    experts = (
        shape.num_layers * shape.num_experts * 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    )
    spread = (parameters(shape) - experts) * (layout.tensor - 1) / layout.tensor
    whole_share = facts.senders / (layout.expert * layout.pipeline) / layout.expert_tensor
    spread += experts * (1 - whole_share)
    return round(spread * facts.trainer.item_bytes)


# A weight update on paper: the very plan of buckets that the ranks make, counted and checked for every rank.

_COPIES = 2
"""Buffers of gathered buckets that take turns on a sender (``checkpoint_conversion.gathering.Buffers``)."""


@dataclass(frozen=True)
class WeightPlan:
    """What one update moves; bytes.

    Attributes:
        ranks, tensors, buckets: how many.
        weights: of all tensors.
        sent: to engines, by sending rank.
        gathered: what ranks exchange so that senders have whole tensors; ``gathered_bound``: the fewest that any
            choice of senders needs; ``gathered_between_nodes``: of it, what leaves a node.
        largest_bucket: of all.
        sender_memory: that the fullest sender's buckets take: two gathered ones and what is coming in.
        engine_communicators: NCCL's buffers on an engine GPU for groups with senders.
        problems: why it would not be a whole update; a line each.
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
    problems: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender over the mean."""
        return max(self.sent.values()) * len(self.sent) / sum(self.sent.values())

    def lines(self) -> Iterator[str]:
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
        yield "every element is sent once" if not self.problems else "\n".join(self.problems)


def weight_plan(facts: RunFacts, ranks_per_node: int) -> WeightPlan:
    """The update of ``facts`` whose trainer has ``ranks_per_node`` ranks on each node."""
    trainer, item = facts.trainer, facts.trainer.item_bytes
    plan = gather_plan.hf_buckets_plan(
        trainer.shape,
        trainer.layout,
        facts.bucket_bytes,
        item,
        spread=True,
        ranks_per_node=facts.ranks_per_sender,
    )
    sent: Counter[int] = Counter()
    for bucket in plan:
        sent[bucket.receiver] += bucket.elements * item
    return WeightPlan(
        ranks=trainer.layout.world_size,
        tensors=sum(len(bucket.tensors) for bucket in plan),
        buckets=len(plan),
        weights=sum(sent.values()),
        sent=dict(sent),
        gathered=sum(gather_plan.elements_between_nodes(b, 1) for b in plan) * item,
        gathered_bound=gather_plan.fewest_gathered_elements(trainer.shape, trainer.layout) * item,
        gathered_between_nodes=sum(
            gather_plan.elements_between_nodes(b, ranks_per_node) for b in plan
        )
        * item,
        largest_bucket=max(bucket.elements for bucket in plan) * item,
        sender_memory=max(
            _COPIES * b.elements + gather_plan.elements_between_nodes(b, 1) for b in plan
        )
        * item,
        engine_communicators=len(sent) * PER_COMMUNICATOR,
        problems=tuple(plan_faults(plan)),
    )


def plan_faults(plan: Sequence[gather_plan.Bucket]) -> Iterator[str]:
    """Tensors that come twice, and elements that come from no rank or from two."""
    names = Counter(tensor.name for bucket in plan for tensor in bucket.tensors)
    yield from (f"{name} is in {count} buckets" for name, count in names.items() if count > 1)
    for bucket in plan:
        for tensor in bucket.tensors:
            try:
                check_sources(tensor)
            except ProofError as error:
                yield str(error)
