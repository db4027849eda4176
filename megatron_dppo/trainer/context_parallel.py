"""Context parallelism: the ranks that share a sequence's tokens, in Transformer Engine's layout of packed sequences.

Every sequence of a pack is padded to 2 C equal chunks, C = context-parallel size, and rank r holds the chunks r and
2 C - 1 - r of each sequence. Under a causal mask later tokens attend to more tokens, so this division gives all ranks
equal work. Each rank's layers compute the rank's rows; attention exchanges keys and values. From the last layer's
output a rank computes the statistics of its rows. All ranks then gather the statistics of all rows, because the loss is
a function of whole sequences; the loss is equal on every rank. In the backward pass a rank gets the gradient of its
rows. The data-parallel reduction includes the context-parallel ranks, so it also sums the parameters' gradients over
these ranks.

T = tokens of a pack, t = T / C, S = sequences of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.data.packing import PackedBatch
from megatron_dppo.trainer.topology import Topology
from megatron_dppo.vocab_parallel import PolicyStats


def own_rows(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """Return the rows of the pack that rank ``rank`` of ``size`` ranks holds, in the rank's order: int64 [T / size].

    The result is on the device of ``cu_seqlens`` [S + 1], and is computed without a device sync. ``tokens``: T. The
    length of every sequence must be a multiple of 2 * size.
    """
    bounds = cu_seqlens.long()
    own_bounds = bounds // size
    own_row = torch.arange(tokens // size, device=bounds.device)
    # ``sequence`` is the number of each row's sequence, and ``chunk_length`` the length of this sequence's chunks.
    sequence = torch.searchsorted(own_bounds[1:], own_row, right=True)
    chunk_length = (bounds[sequence + 1] - bounds[sequence]) // (2 * size)
    # The rank holds two chunks of a sequence, one after another. The second chunk is as far from the sequence's end as
    # the first chunk is from the sequence's start.
    own_offset = own_row - own_bounds[sequence]
    is_second = own_offset >= chunk_length
    chunk_number = torch.where(is_second, 2 * size - 1 - rank, rank)
    offset_in_chunk = own_offset - is_second * chunk_length
    return bounds[sequence] + chunk_number * chunk_length + offset_in_chunk


def gathered_rows(cu_seqlens: Tensor, tokens: int, size: int) -> Tensor:
    """Concatenate the ``own_rows`` of all ranks: int64 [T]."""
    return torch.cat([own_rows(cu_seqlens, tokens, size, rank) for rank in range(size)])


@dataclass(frozen=True)
class TokenShare:
    """The tokens of a pack that this rank's layers compute.

    Context parallelism distributes chunks of each sequence. Outside attention, sequence parallelism divides a rank's
    tokens into equal runs.
    """

    context_size: int = 1
    context_rank: int = 0
    sequence_size: int = 1
    sequence_rank: int = 0

    @property
    def sequence_multiple(self) -> int:
        """The length of every sequence must be a multiple of this number."""
        if self.context_size > 1:
            return 2 * self.context_size
        return 1

    def rows(self, cu_seqlens: Tensor) -> Tensor:
        """Return the rows of a pack that this rank's layers compute outside attention.

        ``cu_seqlens`` [S + 1] are the pack's boundaries; the result is int64 [T / (context_size * sequence_size)].
        """
        rows = own_rows(cu_seqlens, int(cu_seqlens[-1]), self.context_size, self.context_rank)
        return rows.chunk(self.sequence_size)[self.sequence_rank]


def own_batch(batch: PackedBatch, topology: Topology) -> PackedBatch:
    """Return ``batch`` with only the rows of this rank.

    ``batch`` must have its targets and columns already. The target of a token is the next token of the sequence, and
    another rank may hold the next token.
    """
    size = topology.cp_size
    if size == 1:
        return batch
    return batch.rows(own_rows(batch.cu_seqlens, batch.num_tokens, size, topology.cp_rank))


def whole_stats(stats: PolicyStats, batch: PackedBatch, topology: Topology) -> PolicyStats:
    """Return the statistics of all rows of ``batch``. Collective.

    ``stats``: the statistics of this rank's ``own_batch``. The function communicates by one all-gather of the
    statistics, [t, 1 + K] numbers or more, and one all-reduce of the fault counts. The backward pass gives every rank
    the gradient of the rank's rows. All ranks compute the same loss, so the backward pass sums nothing over ranks.
    """
    size = topology.cp_size
    group = topology.context_group
    if size == 1:
        return stats
    parts = {
        "log_probs": stats.log_probs[:, None],
        "entropy": None if stats.entropy is None else stats.entropy[:, None],
        "sum_squares": None if stats.sum_squares is None else stats.sum_squares[:, None],
        "topk_log_probs": stats.topk_log_probs,
        "teacher_topk_log_probs": stats.teacher_topk_log_probs,
    }
    present_parts = {name: part for name, part in parts.items() if part is not None}
    order = gathered_rows(batch.cu_seqlens, batch.num_tokens, size)
    columns = torch.cat(list(present_parts.values()), dim=1)
    gathered = _Gather.apply(columns, order, group)
    widths = [part.shape[1] for part in present_parts.values()]
    all_rows = dict(zip(present_parts, gathered.split(widths, dim=1), strict=True))
    squares = None
    if "sum_squares" in all_rows:
        squares = all_rows["sum_squares"].squeeze(1).detach()
    fault_counts = stats.fault_counts.clone()
    dist.all_reduce(fault_counts, group=group)
    return replace(
        stats,
        log_probs=all_rows["log_probs"].squeeze(1),
        entropy=all_rows["entropy"].squeeze(1) if "entropy" in all_rows else None,
        sum_squares=squares,
        topk_log_probs=_like_own(all_rows.get("topk_log_probs"), stats.topk_log_probs),
        teacher_topk_log_probs=all_rows.get("teacher_topk_log_probs"),
        fault_counts=fault_counts,
    )


def _like_own(gathered: Tensor | None, own: Tensor | None) -> Tensor | None:
    """Detach ``gathered`` unless ``own``, this rank's part, requires a gradient.

    If one of the columns of ``_Gather`` requires a gradient, all gathered columns require a gradient.
    """
    if gathered is None or own is None or own.requires_grad:
        return gathered
    return gathered.detach()


class _Gather(torch.autograd.Function):
    """Gather [t, ...] of every rank to [T, ...] in the pack's order. ``order`` int64 [T]: from ``gathered_rows``."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor, group: ProcessGroup) -> Tensor:
        # ``order`` has the rows of rank 0, then of rank 1, and so on: each rank's rows are an equal chunk.
        ctx.rows = order.chunk(group.size())[group.rank()]
        gathered = own.new_empty(len(order), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.rows), None, None
