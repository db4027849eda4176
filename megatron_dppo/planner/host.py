"""Host memory of a node: processes, a batch's columns, checkpoint pieces, the engines' pinned buffers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.planner.columns import ColumnBytes
from megatron_dppo.planner.job import Job
from megatron_dppo.planner.roles import NodeRoles
from megatron_dppo.planner.units import GIB
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

    ``checkpoint``: fp32 state that the first replica's ranks gather to write it (``trainer/optimizer_state.py``).
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
    copy where shared memory has room. checkpoint: with the distributed
    optimizer the first rank of each group of replicas gathers the fp32 state (12 bytes an element, 8 in float32) of
    what it holds.
    """
    copies = COPIES + job.rollout.staleness
    per_rank = columns.replicas / job.trainer.layout.data
    return HostBytes(
        processes=node.trainer * TRAINER_PROCESS + node.engine * ENGINE_PROCESS,
        batch=round(node.trainer * copies * per_rank),
        checkpoint=sum(_gathered(job, rank) for rank in node.ranks)
        if job.trainer.distributed
        else 0,
        capture=node.engine * capture,
    )


def _gathered(job: Job, rank: int) -> int:
    """fp32 state that ``rank`` gathers: of dense parameters in replica 0, of experts in their replica 0."""
    layout = job.trainer.layout
    at, held = layout.coordinates(rank), rank_parameters(job.trainer.shape, layout, 0)
    count = elements(held.dense) * (at.dp == 0) + elements(held.experts) * (at.edp == 0)
    return count * (8 if job.trainer.dtype == "float32" else 12)
