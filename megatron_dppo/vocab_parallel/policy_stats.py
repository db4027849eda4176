"""Log-probabilities, Top-K and entropy from tensor-parallel logits in one pass, with the gradient
written in place.

Legend: T = tokens, C = columns of this rank's shard, V = true vocabulary, K = ids of TopK(mu).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.vocab_parallel import wire
from megatron_dppo.vocab_parallel.backends import choose
from megatron_dppo.vocab_parallel.row_kernels import Backend, RowGradient
from megatron_dppo.vocab_parallel.wire import Agreement, VocabShard

FAULTS = (
    "target ids outside the vocabulary",
    "Top-K ids outside the vocabulary",
    "rows of logits that hold NaN or +inf, or nothing but -inf",
)
"""What depends on values: counted on the device, in this order."""


def _argument_faults(
    logits: Tensor,
    target_ids: Tensor,
    topk_ids: Tensor | None,
    vocab_size: int,
    temperature: float,
    ranks: int,
) -> Iterator[str]:
    """What is wrong with shapes, dtypes and numbers. Each check relies on those before it: stop at the first."""
    if logits.ndim != 2 or not logits.is_floating_point():
        yield f"logits are {_described(logits)}, expected floating point [T, C]"
    rows, columns = logits.shape
    if not logits.is_contiguous():
        yield f"logits have strides {logits.stride()}, expected contiguous {tuple(logits.shape)}"
    if isinstance(vocab_size, bool) or not 0 < vocab_size <= ranks * columns:
        yield (
            f"vocab_size is {vocab_size!r}, expected 1 .. {ranks * columns} "
            f"({ranks} rank(s) x {columns} columns)"
        )
    if isinstance(temperature, bool) or not 0 < temperature < float("inf"):
        yield f"temperature is {temperature!r}, expected a positive number"
    if target_ids.dtype != torch.int64 or target_ids.shape != (rows,):
        yield (
            f"target_ids are {_described(target_ids)}, expected torch.int64 ({rows},) to match "
            f"logits {tuple(logits.shape)}"
        )
    if topk_ids is not None and (topk_ids.dtype != torch.int64 or topk_ids.ndim != 2):
        yield f"topk_ids are {_described(topk_ids)}, expected torch.int64 ({rows}, K)"
    if topk_ids is not None and (len(topk_ids) != rows or topk_ids.shape[1] < 1):
        yield f"topk_ids have shape {tuple(topk_ids.shape)}, expected ({rows}, K) with K >= 1"


def id_faults(target_ids: Tensor, topk_ids: Tensor | None, vocab_size: int) -> list[Tensor]:
    """Float32 counts of the first two ``FAULTS``. A Top-K id of -1 means "none" and is no fault."""
    none = torch.zeros((), device=target_ids.device)
    topk = none if topk_ids is None else _outside(topk_ids, -1, vocab_size)
    return [_outside(target_ids, 0, vocab_size), topk]


def _outside(ids: Tensor, low: int, high: int) -> Tensor:
    if ids.is_cpu and ids.numel():
        smallest, largest = ids.aminmax()
        # One pass over the ids where all is well.
        if smallest >= low and largest < high:
            return torch.zeros(())
    return ((ids < low) | (ids >= high)).sum().float()


def describe(faults: Sequence[Tensor] | Tensor) -> str | None:
    """An error message for counts in the order of ``FAULTS``; None where all are 0. Reads them."""
    counts = [f"{int(n)} {fault}" for n, fault in zip(faults, FAULTS, strict=False) if n]
    return f"policy_stats: {'; '.join(counts)}" if counts else None


def _described(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


@dataclass(frozen=True)
class PolicyStats:
    """Per token, the same on every tensor-parallel rank; natural logarithms; float32 (float64 for
    float64 logits).
    """

    log_probs: Tensor
    """[T]: log pi of the target, differentiable. Its relative error is that of float32 (and of e^z)
    also where pi is nearly 1: 1 - pi = -expm1(log pi) is as exact as pi.
    """
    topk_log_probs: Tensor | None
    """[T, K]: log pi at the given ids, without gradient."""
    entropy: Tensor | None
    """[T], nats, differentiable."""
    faults: Tensor
    """float32 [3]: counts of ``FAULTS``."""

    def raise_on_faults(self) -> None:
        """ValueError that names what ``faults`` counts. Reads from the device: a sync on a GPU."""
        message = describe(self.faults)
        if message is not None:
            raise ValueError(message)


class OverwrittenLogitsError(RuntimeError):
    """The logits given hold a gradient: an earlier ``policy_stats`` wrote its backward pass over
    them.
    """


def policy_stats(
    logits: Tensor,
    target_ids: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
    overwrite_logits: bool = True,
    backend: str | None = None,
    raise_on_faults: bool | None = None,
) -> PolicyStats:
    """log softmax(logits / temperature) at ``target_ids`` and ``topk_ids``, and the entropy, over
    the whole vocabulary.

    ``logits`` [T, C]: this rank's columns, any float dtype; shards are equal and in rank order of
    ``group``; columns from ``vocab_size`` on are padding. ``target_ids`` int64 [T] and ``topk_ids``
    int64 [T, K] are global ids, the same on every rank; a Top-K id of -1 means "none" and gives
    -inf. ``group``: the tensor-parallel group; None: one rank.

    Cost: one read of the shard, one packed all-reduce (and on CPU groups a header of 56 bytes a
    rank, which overlaps the read), and in the backward pass one read and one write. The gradient
    dL/dlogits is written over ``logits`` unless ``overwrite_logits`` is False; their reuse then
    raises, in autograd or as OverwrittenLogitsError. Rows with a zero gradient are written without
    being read.

    ``backend``: a name in ``backends.BACKENDS``; None: the fastest one that is available.

    Raises ValueError, on every rank alike, where shapes, dtypes or numbers are wrong, ids lie
    outside the vocabulary, rows hold NaN, or ranks disagree. ``raise_on_faults`` False (None: on a
    GPU): what depends on values is not read back; it makes the rows' results NaN and is counted in
    ``PolicyStats.faults``, for a caller who stops all ranks together.
    """
    if getattr(logits, "_holds_gradient", False):
        raise OverwrittenLogitsError(
            "policy_stats was given logits over which its own backward pass has written a gradient"
        )
    ranks = 1 if group is None else dist.get_world_size(group)
    arguments = (logits, target_ids, topk_ids, vocab_size, temperature, ranks)
    fault = next(_argument_faults(*arguments), None)
    message = None if fault is None else f"policy_stats: {fault}"
    faults = id_faults(target_ids, topk_ids, vocab_size) if message is None else []
    on_cpu = logits.device.type == "cpu"
    raise_now = on_cpu if raise_on_faults is None else raise_on_faults
    agreement = None
    if raise_now:
        message = message or describe(faults)
    # A payload whose size differs between ranks ends a gloo process by abort, so it must be known before. On a GPU,
    # where it would hang NCCL, asking costs a device sync, and the model's own collectives have carried the same T.
    if on_cpu and group is not None:
        call = (logits, target_ids, topk_ids, with_entropy, vocab_size)
        agreement = Agreement(group, _facts(*call) if message is None else None)
    if message is not None:
        raise ValueError(message)
    log_probs, topk, entropy, bad_rows = _PolicyStats.apply(
        logits,
        _Call(
            VocabShard.of(logits.shape[1], vocab_size, group),
            group,
            target_ids,
            topk_ids,
            1.0 / temperature,
            with_entropy,
            overwrite_logits,
            choose(logits, backend),
            agreement,
            raise_now,
        ),
    )
    stats = PolicyStats(log_probs, topk, entropy, torch.stack([*faults, bad_rows]))
    if raise_now:
        stats.raise_on_faults()
    return stats


@dataclass(frozen=True)
class _Call:
    shard: VocabShard
    group: dist.ProcessGroup | None
    target_ids: Tensor
    topk_ids: Tensor | None
    scale: float
    with_entropy: bool
    overwrite: bool
    backend: Backend
    agreement: Agreement | None
    ids_checked: bool


class _PolicyStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, call: _Call
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        shard, values = call.shard, logits.detach()
        ids = call.target_ids[:, None]
        if call.topk_ids is not None:
            ids = torch.cat([ids, call.topk_ids], 1)
        columns = shard.local(ids)
        lse, plogp, owned = call.backend.forward(
            values, shard.real, call.scale, columns, call.with_entropy
        )
        unknown = None if call.ids_checked else shard.unknown(ids)
        # An id that no rank owns: no share of the row's sums here, and NaN in the end.
        if unknown is not None:
            owned.masked_fill_(unknown, -torch.inf)
        if call.agreement is not None:
            call.agreement.check()
        reduced = wire.reduce_rows(shard, lse, plogp, owned, call.scale, call.group)
        log_p = wire.log_softmax_at(reduced, call.scale).to(owned.dtype)
        if unknown is not None:
            log_p.masked_fill_(unknown, torch.nan)
        topk = None
        if call.topk_ids is not None:
            topk = log_p[:, 1:].masked_fill(call.topk_ids < 0, -torch.inf)
        entropy = None if reduced.entropy is None else reduced.entropy.to(owned.dtype)
        bad_rows = (~reduced.lse.isfinite()).sum().float()
        ctx.call, ctx.targets = call, columns[:, 0]
        ctx.save_for_backward(logits, reduced.lse, reduced.entropy)
        ctx.mark_non_differentiable(*(x for x in (topk, bad_rows) if x is not None))
        ctx.set_materialize_grads(False)
        return log_p[:, 0].contiguous(), topk, entropy, bad_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        logits, lse, entropy = ctx.saved_tensors
        grad_log_probs, _, grad_entropy, _ = grads
        if grad_log_probs is None and grad_entropy is None:
            return None, None
        call: _Call = ctx.call
        out = logits.detach() if call.overwrite else torch.empty_like(logits)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse, dtype=torch.float32)
        gradient = RowGradient(
            lse,
            ctx.targets,
            grad_log_probs,
            grad_entropy,
            None if grad_entropy is None else entropy,
        )
        call.backend.backward(logits.detach(), call.shard.real, call.scale, gradient, out)
        if call.overwrite:
            torch.autograd.graph.increment_version(logits)
            logits._holds_gradient = True
        return out, None


def _facts(
    logits: Tensor, target_ids: Tensor, topk_ids: Tensor | None, with_entropy: bool, vocab_size: int
) -> list[int]:
    """In the order of ``wire.FACTS``."""
    width = 0 if topk_ids is None else topk_ids.shape[1]
    ids = wire.checksum(target_ids, topk_ids)
    return [*logits.shape, width, int(with_entropy), vocab_size, ids]


def dense_policy_stats(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
) -> PolicyStats:
    """What ``policy_stats`` computes, written for reading: from unsharded ``logits`` [T, >= vocab_size], in float64
    throughout.

    Gradients flow to ``logits`` through ``log_probs`` and ``entropy``; not through
    ``topk_log_probs``.
    """
    log_p = (logits[:, :vocab_size].double() / temperature).log_softmax(-1)
    topk = None
    if topk_ids is not None:
        topk = log_p.detach().gather(1, topk_ids.clamp(min=0))
        topk = torch.where(topk_ids < 0, -torch.inf, topk)
    entropy = None
    if with_entropy:
        p = log_p.exp()
        entropy = -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)
    return PolicyStats(
        log_p.gather(1, target_ids[:, None])[:, 0], topk, entropy, log_p.new_zeros(3)
    )
