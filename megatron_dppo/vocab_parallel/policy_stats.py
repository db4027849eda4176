"""Log-probabilities, Top-K and entropy from tensor-parallel logits in one pass. The gradient is written in place.

Legend: T = tokens, C = columns of this rank's shard, V = vocabulary without padding, K = number of ids of TopK(mu).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.vocab_parallel import wire
from megatron_dppo.vocab_parallel.agreement import Agreement, checksum
from megatron_dppo.vocab_parallel.backends import Backend, RowGradient, choose
from megatron_dppo.vocab_parallel.wire import VocabShard

FAULTS = (
    "target ids outside the vocabulary",
    "Top-K ids outside the vocabulary",
    "rows of logits that hold NaN or +inf, or nothing but -inf",
)
"""The faults that depend on values. The device counts them, in this order."""


def logits_faults(logits: Tensor) -> Iterator[str]:
    """Yield faults of the logits. They must be [T, C], contiguous, of a floating dtype. Read only the first fault."""
    if logits.ndim != 2 or not logits.is_floating_point():
        yield f"logits are {dtype_and_shape(logits)}, expected floating point [T, C]"
    if not logits.is_contiguous():
        yield f"logits have strides {logits.stride()}, expected contiguous {tuple(logits.shape)}"


def argument_faults(query: StatsQuery, rows: int, columns: int, ranks: int) -> Iterator[str]:
    """Yield faults of shapes, dtypes and numbers, for logits [``rows``, ``columns``] on each of ``ranks``.

    Read only the first fault: each check relies on the checks above it.
    """
    vocab_size = query.vocab_size
    temperature = query.temperature
    target_ids = query.target_ids
    topk_ids = query.topk_ids
    if isinstance(vocab_size, bool) or not 0 < vocab_size <= ranks * columns:
        yield (
            f"vocab_size is {vocab_size!r}, expected 1 .. {ranks * columns} "
            f"({ranks} rank(s) x {columns} columns)"
        )
    if isinstance(temperature, bool) or not 0 < temperature < float("inf"):
        yield f"temperature is {temperature!r}, expected a positive number"
    if target_ids.dtype != torch.int64 or target_ids.shape != (rows,):
        yield (
            f"target_ids are {dtype_and_shape(target_ids)}, expected torch.int64 ({rows},) to match "
            f"logits ({rows}, {columns})"
        )
    if topk_ids is not None and (topk_ids.dtype != torch.int64 or topk_ids.ndim != 2):
        yield f"topk_ids are {dtype_and_shape(topk_ids)}, expected torch.int64 ({rows}, K)"
    if topk_ids is not None and (len(topk_ids) != rows or topk_ids.shape[1] < 1):
        yield f"topk_ids have shape {tuple(topk_ids.shape)}, expected ({rows}, K) with K >= 1"


def count_id_faults(target_ids: Tensor, topk_ids: Tensor | None, vocab_size: int) -> list[Tensor]:
    """Count the first two ``FAULTS``, float32. A Top-K id of -1 means "none" and is no error."""
    bad_topk_ids = torch.zeros((), device=target_ids.device)
    if topk_ids is not None:
        bad_topk_ids = _count_outside(topk_ids, -1, vocab_size)
    return [_count_outside(target_ids, 0, vocab_size), bad_topk_ids]


def _count_outside(ids: Tensor, low: int, high: int) -> Tensor:
    """Count the ids below ``low``, or not below ``high``."""
    if ids.is_cpu and ids.numel():
        # Valid ids, the usual case, need only one pass.
        minimum, maximum = ids.aminmax()
        if minimum >= low and maximum < high:
            return torch.zeros(())
    return ((ids < low) | (ids >= high)).sum().float()


def fault_message(counts: Sequence[Tensor] | Tensor) -> str | None:
    """Write an error message for ``counts``; None if all counts are 0. Reads the counts from the device.

    ``counts`` has the counts of ``FAULTS``, in this order, or only the first of them.
    """
    texts: list[str] = []
    for count, fault in zip(counts, FAULTS, strict=False):
        if count:
            texts.append(f"{int(count)} {fault}")
    if texts:
        return f"policy_stats: {'; '.join(texts)}"
    return None


def dtype_and_shape(x: Tensor) -> str:
    """Return dtype and shape of ``x``, for messages."""
    return f"{x.dtype} {tuple(x.shape)}"


@dataclass(frozen=True)
class PolicyStats:
    """The statistics of each token, equal on every tensor-parallel rank.

    Logarithms are natural. The dtype is float32, or float64 for float64 logits.
    """

    log_probs: Tensor
    """[T]: log pi of the target, differentiable. The relative error of log pi is only the rounding of float32 and the
    error of e^z, even if pi is nearly 1. So 1 - pi = -expm1(log pi) is as precise as pi.
    """
    topk_log_probs: Tensor | None
    """[T, K]: log pi at ``topk_ids``, differentiable. A token's ids must differ, except that the target may be among
    its ``topk_ids``."""
    entropy: Tensor | None
    """[T], nats, differentiable."""
    fault_counts: Tensor
    """float32 [3]: counts of ``FAULTS``."""
    vocab_size: int | None = None
    """V, or None if it is unknown."""
    sum_squares: Tensor | None = None
    """[T]: sum over the vocabulary of pi^2, without gradient."""
    teacher_topk_log_probs: Tensor | None = None
    """[T, K']: log pi at a teacher's Top-K ids, differentiable. ``StatsFunction`` fills it; the functions of this
    package do not."""

    def raise_on_faults(self) -> None:
        """Raise ValueError unless all ``fault_counts`` are 0. Reads them from the device: a sync on a GPU."""
        message = fault_message(self.fault_counts)
        if message is not None:
            raise ValueError(message)


class OverwrittenLogitsError(RuntimeError):
    """The backward pass of an earlier ``policy_stats`` has overwritten the logits with a gradient."""


def policy_stats(
    logits: Tensor,
    target_ids: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
    with_squares: bool = False,
    backend: str | None = None,
    raise_on_faults: bool | None = None,
) -> PolicyStats:
    """Compute log softmax(logits / temperature) at ``target_ids`` and ``topk_ids``, the entropy, and the sum of squared
    probabilities, over the whole vocabulary.

    Cost: one read of the shard, one packed all-reduce, and in the backward pass one read and one write. CPU groups also
    reduce a header of 64 bytes per rank, while the shard is read. The backward pass writes the gradient dL/dlogits into
    ``logits``. A later use of ``logits`` raises OverwrittenLogitsError or an error of autograd. Pass a copy to keep the
    logits. Rows with a zero gradient are written without being read. A gradient through the log-probabilities at
    ``topk_ids`` writes another [T, 1 + K] numbers.

    Args:
        logits: [T, C], this rank's columns, any float dtype. All shards have the same size and are in rank order of
            ``group``. Columns from ``vocab_size`` on are padding.
        target_ids: int64 [T], global ids, the same on every rank.
        group: The tensor-parallel group; None: one rank.
        vocab_size: V.
        temperature: Divides the logits.
        topk_ids: int64 [T, K], global ids, the same on every rank. -1 means "none" and results in -inf.
        with_entropy: Whether to compute the entropy.
        with_squares: Whether to compute the sum of squares.
        backend: A name in ``backends.BACKENDS``; None: the fastest available one.
        raise_on_faults: Whether to read the counts of ``FAULTS`` from the device and raise. None: on a CPU only. With
            False, the results of invalid rows are NaN and ``PolicyStats.fault_counts`` has the counts, so that the
            caller can stop all ranks together.

    Raises:
        ValueError: On every rank: a wrong shape, dtype or number, ids outside the vocabulary, rows with NaN, or ranks
            that disagree.
    """
    if getattr(logits, "_holds_gradient", False):
        raise OverwrittenLogitsError(
            "policy_stats was given logits over which its own backward pass has written a gradient"
        )
    request = StatsRequest.checked(
        StatsQuery(target_ids, topk_ids, vocab_size, temperature, with_entropy, with_squares),
        logits,
        logits.shape[-1],
        group,
        backend=backend,
        raise_on_faults=raise_on_faults,
        fault=next(logits_faults(logits), None),
    )
    return request.result(*_PolicyStats.apply(logits, request))


@dataclass(frozen=True)
class StatTensors:
    """Statistics of the rows over all shards: ``log_probs`` [T], ``topk_log_probs`` [T, K], ``entropy`` and
    ``sum_squares`` [T]. The backward pass reads ``lse`` and ``entropy_float64``, float64 [T]. ``bad_rows`` is the count
    of the third of ``FAULTS``.
    """

    log_probs: Tensor
    topk_log_probs: Tensor | None
    entropy: Tensor | None
    sum_squares: Tensor | None
    bad_rows: Tensor
    lse: Tensor
    entropy_float64: Tensor | None


@dataclass(frozen=True)
class StatsQuery:
    """The unchecked arguments of ``policy_stats``, except the logits and the group."""

    target_ids: Tensor
    topk_ids: Tensor | None
    vocab_size: int
    temperature: float
    with_entropy: bool
    with_squares: bool = False

    def facts(self, rows: int, columns: int) -> list[int]:
        """Return the numbers that must be equal on all ranks, in the order of ``agreement.FACTS``."""
        topk = 0
        if self.topk_ids is not None:
            topk = self.topk_ids.shape[1]
        id_sum = checksum(self.target_ids, self.topk_ids)
        sums = int(self.with_entropy), int(self.with_squares)
        return [rows, columns, topk, *sums, self.vocab_size, id_sum]


@dataclass(frozen=True)
class StatsRequest:
    """A query that all ranks have validated, for logits in equal shards.

    ``id_fault_counts`` are the counts of the first two ``FAULTS``. With ``checks_values``, ``result`` reads these
    counts and the count of bad rows from the device, and raises an error if a count is not 0.
    """

    query: StatsQuery
    shard: VocabShard
    group: dist.ProcessGroup | None
    scale: float
    backend: Backend
    agreement: Agreement | None
    checks_values: bool
    id_fault_counts: list[Tensor]

    @classmethod
    def checked(
        cls,
        query: StatsQuery,
        like: Tensor,
        columns: int,
        group: dist.ProcessGroup | None,
        *,
        backend: str | None,
        raise_on_faults: bool | None,
        fault: str | None,
    ) -> StatsRequest:
        """Validate the query for logits with the rows, device and dtype of ``like``. The logits need not exist yet.

        ``columns``: columns of this rank's shard; ``fault``: a fault that the caller has found. Raises ValueError on
        every rank.
        """
        rank, ranks = 0, 1
        if group is not None:
            rank = dist.get_rank(group)
            ranks = dist.get_world_size(group)
        rows = len(like)
        fault = fault or next(argument_faults(query, rows, columns, ranks), None)
        message = None
        if fault is not None:
            message = f"policy_stats: {fault}"
        id_fault_counts: list[Tensor] = []
        if message is None:
            id_fault_counts = count_id_faults(query.target_ids, query.topk_ids, query.vocab_size)
        on_cpu = like.device.type == "cpu"
        checks_values = on_cpu if raise_on_faults is None else raise_on_faults
        if checks_values:
            message = message or fault_message(id_fault_counts)
        agreement = None
        # On a CPU compare the sizes of all ranks' payloads first: gloo aborts the process if they differ. On a GPU a
        # difference would hang NCCL. But a comparison would cost a device sync, and the ranks' T cannot differ there:
        # the model's own collectives, which need an equal T, have already succeeded.
        if on_cpu and group is not None:
            facts = query.facts(rows, columns) if message is None else None
            agreement = Agreement(group, facts)
        if message is not None:
            raise ValueError(message)
        return cls(
            query,
            VocabShard.part(rank, ranks, columns, query.vocab_size),
            group,
            1.0 / query.temperature,
            choose(like, backend),
            agreement,
            checks_values,
            id_fault_counts,
        )

    @cached_property
    def ids(self) -> Tensor:
        """int64 [T, 1 + K]: the sampled id, then the ids of TopK(mu)."""
        ids = self.query.target_ids[:, None]
        topk_ids = self.query.topk_ids
        if topk_ids is None:
            return ids
        return torch.cat([ids, topk_ids], 1)

    @cached_property
    def columns(self) -> Tensor:
        """int64 [T, 1 + K]: the columns of ``ids`` in this shard, -1 for an id that another rank owns."""
        return self.shard.local(self.ids)

    def tensors_for_backward(self, stats: StatTensors) -> list[Tensor]:
        """Return the tensor that ``IdGradients`` needs: log p [T, 1 + K] at ``ids``. Empty without TopK(mu)."""
        if stats.topk_log_probs is None:
            return []
        return [torch.cat([stats.log_probs[:, None], stats.topk_log_probs], 1)]

    def combine(
        self, lse: Tensor, plogp: Tensor | None, squares: Tensor | None, owned: Tensor
    ) -> StatTensors:
        """Combine this shard's rows (``backends.RowStats``) with the rows of the other shards, by one all-reduce.

        ``owned``: the logits at ``columns``, 0 for an id that another rank owns.
        """
        # With ``checks_values`` all ids are in the vocabulary, or -1 in Top-K. Without ``checks_values``, other ids may
        # be unknown too. An unknown id adds nothing to the row's sums, and its result becomes NaN (-inf for -1).
        unknown = None
        if not self.checks_values:
            unknown = self.shard.unknown(self.ids)
            owned.masked_fill_(unknown, -torch.inf)
        if self.agreement is not None:
            self.agreement.check()
        reduced = wire.reduce_rows(self.shard, lse, plogp, squares, owned, self.scale, self.group)
        log_p = wire.log_softmax_at(reduced, self.scale).to(owned.dtype)
        if unknown is not None:
            log_p.masked_fill_(unknown, torch.nan)
        topk = None
        topk_ids = self.query.topk_ids
        if topk_ids is not None:
            topk = log_p[:, 1:].masked_fill(topk_ids < 0, -torch.inf)
        return StatTensors(
            log_probs=log_p[:, 0].contiguous(),
            topk_log_probs=topk,
            entropy=None if reduced.entropy is None else reduced.entropy.to(owned.dtype),
            sum_squares=None if reduced.squares is None else reduced.squares.to(owned.dtype),
            bad_rows=(~reduced.lse.isfinite()).sum().float(),
            lse=reduced.lse,
            entropy_float64=reduced.entropy,
        )

    def result(
        self,
        log_probs: Tensor,
        topk: Tensor | None,
        entropy: Tensor | None,
        squares: Tensor | None,
        bad_rows: Tensor,
    ) -> PolicyStats:
        """Build the result. Raises ValueError for invalid ids or rows if values are checked."""
        fault_counts = torch.stack([*self.id_fault_counts, bad_rows])
        stats = PolicyStats(log_probs, topk, entropy, fault_counts, self.query.vocab_size, squares)
        if self.checks_values:
            stats.raise_on_faults()
        return stats


class _PolicyStats(torch.autograd.Function):
    """The statistics of ``StatTensors``. The backward pass writes their gradient into the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, request: StatsRequest
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        shard = request.shard
        query = request.query
        shard_stats = request.backend.forward(
            logits.detach(),
            shard.real,
            request.scale,
            request.columns,
            query.with_entropy,
            query.with_squares,
        )
        stats = request.combine(*shard_stats)
        topk = stats.topk_log_probs
        bad_rows = stats.bad_rows
        ctx.request = request
        id_tensors = request.tensors_for_backward(stats)
        ctx.save_for_backward(logits, stats.lse, stats.entropy_float64, *id_tensors)
        without_gradient = [x for x in (stats.sum_squares, bad_rows) if x is not None]
        ctx.mark_non_differentiable(*without_gradient)
        ctx.set_materialize_grads(False)
        return stats.log_probs, topk, stats.entropy, stats.sum_squares, bad_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        logits, lse, entropy, *log_p = ctx.saved_tensors
        grad_log_probs, grad_topk, grad_entropy, *_ = grads
        if grad_log_probs is None and grad_topk is None and grad_entropy is None:
            return None, None
        request: StatsRequest = ctx.request
        id_gradients = IdGradients.of(request.ids, log_p, grad_log_probs, grad_topk)
        out = logits.detach()
        # The row kernel writes the gradient that results if the gradients at all ids belonged to the sampled id.
        # ``IdGradients.write`` then corrects the columns of the ids.
        total = grad_log_probs
        if id_gradients is not None:
            total = id_gradients.total
        gradient = row_gradient(request.columns[:, 0], lse, entropy, total, grad_entropy)
        real = request.shard.real
        request.backend.backward(out, real, request.scale, gradient, out)
        if id_gradients is not None:
            id_gradients.write(out, request.columns, request.scale, gradient)
        torch.autograd.graph.increment_version(logits)
        logits._holds_gradient = True
        return out, None


@dataclass(frozen=True)
class IdGradients:
    """The gradient dL/d log p at the sampled id and the ids of TopK(mu).

    Attributes:
        coefficients: [T, 1 + K], dL/d log p. If the sampled id is also in TopK(mu), both columns hold the sum.
        log_p: [T, 1 + K], log p at the ids.
        total: [T], the sum of dL/d log p over the ids.
    """

    coefficients: Tensor
    log_p: Tensor
    total: Tensor

    @classmethod
    def of(
        cls,
        ids: Tensor,
        log_p: Sequence[Tensor],
        grad_log_probs: Tensor | None,
        grad_topk: Tensor | None,
    ) -> IdGradients | None:
        """Build the gradients; None if TopK(mu) has no gradient.

        ``ids``: int64 [T, 1 + K], -1 in columns without an id. ``log_p``: the result of
        ``StatsRequest.tensors_for_backward``.
        """
        if grad_topk is None:
            return None
        topk = torch.where(ids[:, 1:] >= 0, grad_topk, 0.0)
        sampled = torch.zeros_like(topk[:, 0]) if grad_log_probs is None else grad_log_probs
        is_sampled = ids[:, 1:] == ids[:, :1]
        sampled_sum = sampled + torch.where(is_sampled, topk, 0.0).sum(1)
        topk_sums = torch.where(is_sampled, sampled_sum[:, None], topk)
        coefficients = torch.cat([sampled_sum[:, None], topk_sums], 1)
        return cls(coefficients, log_p[0], sampled + topk.sum(1))

    def rows(self, index: slice | Tensor) -> IdGradients:
        """Select the gradients of some tokens."""
        return IdGradients(self.coefficients[index], self.log_p[index], self.total[index])

    def write(self, out: Tensor, columns: Tensor, scale: float, gradient: RowGradient) -> None:
        """Write the gradient at all ids into ``out``: scale [ c - total p - h p (log p + H) ].

        c and p are the id's coefficient and probability.

        Args:
            out: [T, C], the gradient that results if all of ``total`` belonged to the sampled id.
            columns: int64 [T, 1 + K], columns of the ids in this shard; -1 for an id that another rank owns.
            scale: 1 / temperature.
            gradient: The gradient of the rows, with h (``grad_entropy``) and H (``entropy``).
        """
        log_p = self.log_p.double()
        total = self.total[:, None].double()
        # This is c - total p, without cancellation if p is nearly 1 and c equals the total.
        value = (self.coefficients.double() - total) - total * torch.expm1(log_p)
        if gradient.grad_entropy is not None:
            assert gradient.entropy is not None
            p = log_p.exp()
            # The product of p = 0 and log p = -inf must be 0, not NaN.
            entropy_term = torch.where(p > 0, p * (log_p + gradient.entropy[:, None]), 0.0)
            value = value - gradient.grad_entropy[:, None] * entropy_term
        value = (scale * value).to(out.dtype)
        # Every id writes, because a selection of owned ids would need a device sync. An id of another rank repeats the
        # write of the row's first owned id. If the row has no owned id, all its ids write column 0 unchanged. So all
        # writes to one column write the same value, and their order does not matter.
        is_owned = columns >= 0
        first_owned = is_owned.to(torch.uint8).argmax(1, keepdim=True)
        repeated_column = columns.gather(1, first_owned)
        repeated_value = torch.where(repeated_column >= 0, value.gather(1, first_owned), out[:, :1])
        index = torch.where(is_owned, columns, repeated_column.clamp(min=0))
        index += out.shape[1] * torch.arange(len(out), device=out.device)[:, None]
        new_values = torch.where(is_owned, value, repeated_value)
        # On a CPU scatter_ first copies its whole output. The copy takes five times as long as this whole update.
        out.view(-1).index_copy_(0, index.flatten(), new_values.flatten())


def row_gradient(
    columns: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> RowGradient:
    """Build the gradient of rows whose sampled ids are in ``columns`` int64 [T] of this shard; a None gradient is 0."""
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(lse, dtype=torch.float32)
    if grad_entropy is None:
        entropy = None
    return RowGradient(lse, columns, grad_log_probs, grad_entropy, entropy)


def dense_policy_stats(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
    with_squares: bool = False,
) -> PolicyStats:
    """Compute ``policy_stats`` in a way that is easy to read: from unsharded ``logits`` [T, >= vocab_size], in float64.

    Gradients flow to ``logits`` through all statistics but the sum of squares.
    """
    log_p = (logits[:, :vocab_size].double() / temperature).log_softmax(-1)
    topk = None
    if topk_ids is not None:
        topk = log_p.gather(1, topk_ids.clamp(min=0))
        topk = torch.where(topk_ids < 0, -torch.inf, topk)
    entropy = None
    if with_entropy:
        p = log_p.exp()
        entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)
    squares = None
    if with_squares:
        squares = log_p.detach().exp().square().sum(-1)
    sampled = log_p.gather(1, target_ids[:, None])[:, 0]
    return PolicyStats(sampled, topk, entropy, log_p.new_zeros(3), vocab_size, squares)
