"""Reductions of a step's metrics: over replicas on the last stage, then to the other stages."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist

from megatron_dppo.metrics.masked_tokens import MaskedToken, MaskedTokenCounts, most_masked
from megatron_dppo.metrics.sums import MetricNames, MetricSums
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.collectives import broadcast_json
from megatron_dppo.trainer.topology import Topology


def reduce_metrics(metrics: MetricSums | None, topology: Topology) -> MetricSums:
    """Reduce sums, maxima and minima over all replicas; returned on every rank. Collective.

    One all-reduce over the replicas; with PP > 1 also two broadcasts of the names (JSON) and one of
    the result to the other stages. ``metrics``: of this replica on the last stage, else None.
    """
    names, vector = MetricNames(), torch.empty(0)
    device = platform.current().device
    if metrics is not None:
        names = metrics.names
        vector = metrics.to_vector(topology.dp_rank, topology.dp_size, device)
        dist.all_reduce(vector, group=topology.data_group)
    if topology.pp_size > 1:
        source, group = topology.last_stage_rank, topology.pipeline_group
        received = broadcast_json(asdict(names), source, group)
        names = MetricNames(**{kind: tuple(keys) for kind, keys in received.items()})
        if metrics is None:
            size = names.vector_size(topology.dp_size)
            vector = torch.empty(size, dtype=torch.float64, device=device)
        dist.broadcast(vector, source, group)
    return MetricSums.from_vector(names, vector, topology.dp_size)


def reduce_masked_tokens(counts: MaskedTokenCounts, topology: Topology) -> list[MaskedToken]:
    """The ids that the mask blocked most often over all replicas; on every rank. Collective.

    ``counts``: of this replica on the last stage (the same on all ranks of its tensor group); unused
    on other stages.
    """
    tokens: list[MaskedToken] = []
    if topology.is_last_stage and counts.counts is not None:
        total = counts.counts.clone()
        dist.all_reduce(total, group=topology.data_group)
        tokens = most_masked(total)
    if topology.pp_size > 1:
        tokens = broadcast_json(tokens, topology.last_stage_rank, topology.pipeline_group)
    return tokens
