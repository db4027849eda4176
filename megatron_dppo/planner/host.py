"""Host memory of a node: processes, a batch's columns, copies for a checkpoint, the engines' pinned buffers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.columns import ColumnBytes
from megatron_dppo.planner.job import Job
from megatron_dppo.planner.roles import NodeRoles
from megatron_dppo.planner.units import GIB, power_of_two
from megatron_dppo.planner.weights import elements, rank_parameters

TRAINER_PROCESS = 4 * GIB
"""Python, torch, CUDA's host side and pinned NCCL buffers of a rank. Assumption; 0.5 GiB were measured without CUDA."""
ENGINE_PROCESS = 8 * GIB
"""The same of a server's GPU, with its share of scheduler, tokenizer and detokenizer. Assumption."""
COPIES = 2
"""Of a batch's columns: the batch that is trained on, and the packs made of it (and with staleness the next one)."""


@dataclass(frozen=True)
class HostBytes:
    """Of one node, which may train, serve or do both.

    ``checkpoint``: pinned copies of what the ranks write (``trainer/host_copy.py``), 0 without the background.
    """

    processes: int
    batch: int
    checkpoint: int
    capture: int

    @property
    def total(self) -> int:
        """All of a node's."""
        return self.processes + self.batch + self.checkpoint + self.capture


def host_bytes(job: Job, columns: ColumnBytes, node: NodeRoles, capture: int) -> HostBytes:
    """Of one node. ``capture``: bytes of R3's pinned buffer of each engine GPU, 0 without R3.

    batch = ranks x copies x columns of all replicas / DP: an upper bound, because the ranks of a replica share a host's
    copy where shared memory has room. checkpoint: each rank copies its share of weights and optimizer state, 14 bytes
    an element that it shares with its replicas (12 in float32); with adapters, of them alone. It copies into one pinned
    buffer, which torch's CachingHostAllocator rounds up to a power of two.
    """
    copies = COPIES + job.rollout.staleness
    per_rank = columns.replicas / job.trainer.layout.data
    return HostBytes(
        processes=node.trainer * TRAINER_PROCESS + node.engine * ENGINE_PROCESS,
        batch=round(node.trainer * copies * per_rank),
        checkpoint=len(node.ranks) * power_of_two(_copied(job)) if job.checkpoint_background else 0,
        capture=node.engine * capture,
    )


def _copied(job: Job) -> int:
    """What a rank of the first stage writes: with its replicas it shares out what they all hold."""
    layout, trained = job.trainer.layout, job.trainer.trained
    if trained is None:
        held = rank_parameters(job.trainer.shape, layout, 0)
        experts = elements(held.experts) * layout.expert * layout.expert_tensor
        written = (elements(held.dense) * layout.tensor + experts) * layout.pipeline
    else:
        written = trained.elements(job.trainer.shape)
    share = written / layout.world_size
    return round(share * (12 if job.trainer.dtype == "float32" else 14))
