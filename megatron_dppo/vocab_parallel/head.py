"""The statistics of ``policy_stats`` from the hidden states: logits are computed for one chunk of tokens at a time.

Legend: T = tokens, N = tokens that count, c = tokens of a chunk, H = width of a hidden state, C = columns of this
rank's shard, K = number of ids of TopK(mu). A row is an index among the N tokens, a position an index among the T
tokens.

Cost: 2 N C H FLOPs forward. The backward pass takes 4 C H for each token whose gradient is not zero, and 2 C H more if
the token's logits are computed again. The last chunk's logits are kept from the forward to the backward pass, so
nothing is computed twice if N <= c. Memory beyond hidden states and weight: one chunk of logits, and the buffers of the
row kernels. Communication: one all-reduce of [N, 2 x ranks + 1 + K] for all chunks together. The entropy and the sum of
squares each add ``ranks`` columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.vocab_parallel.backends import BLOCK_BYTES
from megatron_dppo.vocab_parallel.policy_stats import (
    IdGradients,
    PolicyStats,
    StatsQuery,
    StatsRequest,
    dense_policy_stats,
    dtype_and_shape,
    row_gradient,
)


@dataclass(frozen=True)
class HeadFactor:
    """A term of the logits: ``hidden`` [T, H] times the transpose of ``weight`` [C, H].

    An output layer has one factor. An output layer with an adapter has two factors, each with its own H. If there is a
    ``main_gradient`` [C, H], the gradient of ``weight`` is added to ``main_gradient``, in the dtype of
    ``main_gradient``, and autograd gets no gradient of ``weight``. Else the gradient is summed in float32 and passed to
    autograd.
    """

    hidden: Tensor
    weight: Tensor
    main_gradient: Tensor | None = None


@dataclass(frozen=True)
class HeadOptions:
    """Options of ``head_stats``.

    Attributes:
        chunk_tokens: Number of tokens whose logits exist at a time.
        dtype: Dtype of the logits; None: the dtype of the weight.
        backend: A name in ``backends.BACKENDS``; None: the fastest available one.
        raise_on_faults: As for ``policy_stats``.
    """

    chunk_tokens: int = 4096
    dtype: torch.dtype | None = None
    backend: str | None = None
    raise_on_faults: bool | None = None


def head_stats(
    factors: Sequence[HeadFactor],
    target_ids: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
    with_squares: bool = False,
    counted: Tensor | None = None,
    options: HeadOptions | None = None,
) -> PolicyStats:
    """Compute ``policy_stats`` of logits = sum of hidden weight^T over ``factors``.

    ``counted`` is bool [T], the same on all ranks. Tokens that do not count are not read, and their results are 0.
    None: all tokens count. ``policy_stats`` describes the other arguments, the shards and the errors. All statistics
    but the sum of squares pass gradients to the hidden states and the weight of every factor. Under tensor parallelism
    the gradient of the hidden states is this rank's part, and the caller must sum the parts over the group.
    ``dense_head_stats`` computes these statistics in plain torch.
    """
    options = options or HeadOptions()
    fault = next(_faults(factors, target_ids, counted, options), None)
    positions = None
    if counted is not None and not fault:
        positions = counted.nonzero().squeeze(1)
    query = StatsQuery(target_ids, topk_ids, vocab_size, temperature, with_entropy, with_squares)
    hidden = factors[0].hidden
    weight = factors[0].weight
    count = len(hidden)
    if positions is not None:
        topk = None if topk_ids is None else topk_ids[positions]
        query = replace(query, target_ids=target_ids[positions], topk_ids=topk)
        count = len(positions)
    request = StatsRequest.checked(
        query,
        # The logits do not exist yet. This tensor [count, 0] has their number of rows, device and dtype.
        weight.new_empty(0, dtype=options.dtype).expand(count, 0),
        len(weight),
        group,
        backend=options.backend,
        raise_on_faults=options.raise_on_faults,
        fault=fault,
    )
    head = _Head(request, positions, len(hidden), options)
    tensors = [x for factor in factors for x in (factor.hidden, factor.weight)]
    main_gradients = [factor.main_gradient for factor in factors]
    return request.result(*_HeadStats.apply(head, main_gradients, *tensors))


def dense_head_stats(
    factors: Sequence[HeadFactor],
    target_ids: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
    with_squares: bool = False,
    counted: Tensor | None = None,
) -> PolicyStats:
    """Compute ``head_stats`` in a way that is easy to read: from unsharded weights, in float64 throughout."""
    logits = sum(factor.hidden.double() @ factor.weight.double().T for factor in factors)
    assert isinstance(logits, Tensor)
    stats = dense_policy_stats(
        logits,
        target_ids,
        temperature=temperature,
        vocab_size=vocab_size,
        topk_ids=topk_ids,
        with_entropy=with_entropy,
        with_squares=with_squares,
    )
    if counted is None:
        return stats
    topk = stats.topk_log_probs
    entropy = stats.entropy
    squares = stats.sum_squares
    return PolicyStats(
        torch.where(counted, stats.log_probs, 0.0),
        None if topk is None else torch.where(counted[:, None], topk, 0.0),
        None if entropy is None else torch.where(counted, entropy, 0.0),
        stats.fault_counts,
        vocab_size,
        None if squares is None else torch.where(counted, squares, 0.0),
    )


def _faults(
    factors: Sequence[HeadFactor], target_ids: Tensor, counted: Tensor | None, options: HeadOptions
) -> Iterator[str]:
    """Yield faults of hidden states, weights and ``counted``. Callers read only the first one."""
    tokens = len(factors[0].hidden)
    columns = len(factors[0].weight)
    for factor in factors:
        hidden = factor.hidden
        weight = factor.weight
        if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
            yield (
                f"hidden states are {dtype_and_shape(hidden)} and the weight {dtype_and_shape(weight)}, "
                "expected [T, H] and [C, H]"
            )
        if hidden.dtype != weight.dtype or len(hidden) != tokens or len(weight) != columns:
            yield (
                f"hidden states are {dtype_and_shape(hidden)} and the weight {dtype_and_shape(weight)}, "
                f"expected one dtype, {tokens} tokens and {columns} columns, as the first factor's"
            )
        gradient = factor.main_gradient
        if gradient is not None and gradient.shape != weight.shape:
            yield f"main_gradient is {dtype_and_shape(gradient)}, expected {tuple(weight.shape)}"
    if counted is not None and (counted.dtype != torch.bool or counted.shape != (tokens,)):
        yield f"counted is {dtype_and_shape(counted)}, expected torch.bool ({tokens},)"
    if target_ids.shape != (tokens,):
        yield f"target_ids are {dtype_and_shape(target_ids)}, expected torch.int64 ({tokens},)"
    if options.chunk_tokens < 1:
        yield f"chunk_tokens is {options.chunk_tokens}, expected at least 1"


@dataclass(frozen=True)
class _Head:
    """One call of ``head_stats`` for ``tokens`` tokens.

    ``counted_positions`` int64 [N]: the positions of the tokens that count; None: all tokens count.
    """

    request: StatsRequest
    counted_positions: Tensor | None
    tokens: int
    options: HeadOptions

    def chunks(self, size: int) -> list[slice]:
        """Divide ``size`` rows into chunks of at most ``chunk_tokens`` rows."""
        step = self.options.chunk_tokens
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def buffer(self, size: int, weight: Tensor) -> Tensor:
        """Allocate a buffer for the logits of any chunk of ``size`` rows."""
        shape = min(size, self.options.chunk_tokens), len(weight)
        return weight.new_empty(shape, dtype=self.options.dtype or weight.dtype)

    def positions(self, chunk: slice | Tensor) -> slice | Tensor:
        """Convert rows to positions."""
        if self.counted_positions is None:
            return chunk
        return self.counted_positions[chunk]

    def logits(self, buffer: Tensor, tensors: Sequence[Tensor], chunk: slice | Tensor) -> Tensor:
        """Compute the logits of the rows ``chunk``, [c, C], in the first rows of ``buffer``."""
        positions = self.positions(chunk)
        # The first product overwrites the buffer's contents. Every later product is added.
        beta = 0
        for all_hidden, weight in zip(tensors[::2], tensors[1::2], strict=True):
            hidden = all_hidden[positions]
            buffer = _add_product(buffer[: len(hidden)], hidden, weight.T, beta=beta)
            beta = 1
        return buffer

    def to_all_tokens(self, values: Tensor | None) -> Tensor | None:
        """Expand [N, ...] to [T, ...], with 0 at tokens that do not count."""
        positions = self.counted_positions
        if positions is None or values is None:
            return values
        return values.new_zeros(self.tokens, *values.shape[1:]).index_copy_(0, positions, values)


class _HeadStats(torch.autograd.Function):
    """The statistics of all tokens and their gradient. ``tensors``: hidden states and weight of each factor in turn."""

    @staticmethod
    def forward(
        ctx: Any, head: _Head, main_gradients: Sequence[Tensor | None], *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        request = head.request
        weight = tensors[1]
        columns = request.columns
        size = len(request.columns)
        lse = weight.new_empty(size, dtype=torch.float64)
        plogp = None
        if request.query.with_entropy:
            plogp = torch.empty_like(lse)
        squares = None
        if request.query.with_squares:
            squares = torch.empty_like(lse)
        owned = weight.new_empty(columns.shape, dtype=_sum_dtype(weight))
        buffer = head.buffer(size, weight)
        chunks = head.chunks(size)
        for chunk in chunks:
            logits = head.logits(buffer, tensors, chunk)
            chunk_stats = request.backend.forward(
                logits,
                request.shard.real,
                request.scale,
                columns[chunk],
                plogp is not None,
                squares is not None,
            )
            for out, values in zip((lse, plogp, squares, owned), chunk_stats, strict=True):
                if out is not None and values is not None:
                    out[chunk] = values
        stats = request.combine(lse, plogp, squares, owned)
        topk = head.to_all_tokens(stats.topk_log_probs)
        squares = head.to_all_tokens(stats.sum_squares)
        if any(ctx.needs_input_grad):
            ctx.head = head
            ctx.main_gradients = main_gradients
            # Keep the last chunk's logits, which are still in the buffer, so that the backward pass need not compute
            # them again.
            ctx.kept_chunk = (chunks[-1], buffer) if chunks else None
            id_tensors = request.tensors_for_backward(stats)
            ctx.has_id_tensors = bool(id_tensors)
            ctx.save_for_backward(stats.lse, stats.entropy_float64, *id_tensors, *tensors)
        without_gradient = [x for x in (squares, stats.bad_rows) if x is not None]
        ctx.mark_non_differentiable(*without_gradient)
        ctx.set_materialize_grads(False)
        log_probs = head.to_all_tokens(stats.log_probs)
        assert log_probs is not None
        return log_probs, topk, head.to_all_tokens(stats.entropy), squares, stats.bad_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        lse, entropy, *tensors = ctx.saved_tensors
        log_p: list[Tensor] = []
        if ctx.has_id_tensors:
            log_p = tensors[:1]
            tensors = tensors[1:]
        head: _Head = ctx.head
        # This pass writes a gradient into the kept logits, so a second pass cannot use them.
        kept_chunk = ctx.kept_chunk
        ctx.kept_chunk = None
        row_grads = list(grads[:3])
        if head.counted_positions is not None:
            positions = head.counted_positions
            row_grads = [None if grad is None else grad[positions] for grad in row_grads]
        grad_log_probs, grad_topk, grad_entropy = row_grads
        sums = _Gradients(head, tensors, ctx.needs_input_grad[2:], ctx.main_gradients)
        id_gradients = IdGradients.of(head.request.ids, log_p, grad_log_probs, grad_topk)
        gradient = _RowGradients(
            head.request, lse, entropy, grad_log_probs, id_gradients, grad_entropy
        )
        # Do not compute the logits of a token again if its gradient is 0: DPPO's mask has blocked the token.
        remaining_rows = gradient.nonzero_rows()
        if kept_chunk is None:
            buffer = head.buffer(len(remaining_rows), tensors[1])
        else:
            # The kept chunk is the last chunk, so all other rows lie before its start.
            chunk, buffer = kept_chunk
            earlier_rows = remaining_rows[remaining_rows < chunk.start]
            has_gradient_in_chunk = len(earlier_rows) < len(remaining_rows)
            remaining_rows = earlier_rows
            if has_gradient_in_chunk:
                logits = buffer[: chunk.stop - chunk.start]
                sums.add(gradient.write(logits, chunk), chunk)
        for chunk in head.chunks(len(remaining_rows)):
            rows = remaining_rows[chunk]
            logits = head.logits(buffer, tensors, rows)
            sums.add(gradient.write(logits, rows), rows)
        return None, None, *sums.results()


@dataclass(frozen=True)
class _RowGradients:
    """dL/d log pi and dL/dH of the N rows, and the other inputs of the row kernels' backward pass."""

    request: StatsRequest
    lse: Tensor
    entropy: Tensor | None
    grad_log_probs: Tensor | None
    id_gradients: IdGradients | None
    grad_entropy: Tensor | None

    def nonzero_rows(self) -> Tensor:
        """Return the indices of the rows whose gradient is not 0, int64."""
        is_nonzero = torch.zeros_like(self.lse, dtype=torch.bool)
        for grad in (self.grad_log_probs, self.grad_entropy):
            if grad is not None:
                is_nonzero |= grad != 0
        if self.id_gradients is not None:
            is_nonzero |= (self.id_gradients.coefficients != 0).any(1)
        return is_nonzero.nonzero().squeeze(1)

    def write(self, logits: Tensor, rows: slice | Tensor) -> Tensor:
        """Write dL/dlogits of these rows into their ``logits``, and return them."""
        request = self.request
        entropy = self.entropy
        total = self.grad_log_probs
        if self.id_gradients is not None:
            total = self.id_gradients.total
        gradient = row_gradient(
            request.columns[rows, 0],
            self.lse[rows],
            None if entropy is None else entropy[rows],
            None if total is None else total[rows],
            None if self.grad_entropy is None else self.grad_entropy[rows],
        )
        real = request.shard.real
        scale = request.scale
        request.backend.backward(logits, real, scale, gradient, logits)
        if self.id_gradients is not None:
            id_gradients = self.id_gradients.rows(rows)
            id_gradients.write(logits, request.columns[rows], scale, gradient)
        return logits


class _Gradients:
    """The gradients of hidden states and weights, summed over chunks; None for a tensor that needs no gradient.

    ``tensors`` and ``needed`` have an entry for the hidden states and one for the weight of each factor in turn.
    """

    def __init__(
        self,
        head: _Head,
        tensors: Sequence[Tensor],
        needed: Sequence[bool],
        main_gradients: Sequence[Tensor | None],
    ) -> None:
        self._head = head
        self._tensors = tensors
        self._main_gradients = main_gradients
        self._hidden: list[Tensor | None] = []
        for hidden, is_needed in zip(tensors[::2], needed[::2], strict=True):
            self._hidden.append(torch.zeros_like(hidden) if is_needed else None)
        self._weights: list[Tensor | None] = []
        for weight, is_needed, main_gradient in zip(
            tensors[1::2], needed[1::2], main_gradients, strict=True
        ):
            self._weights.append(_weight_sum(weight, main_gradient) if is_needed else None)

    def add(self, logits: Tensor, rows: slice | Tensor) -> None:
        """Add the gradients of ``rows``. ``logits`` [c, C] contains dL/dlogits of these rows."""
        positions = self._head.positions(rows)
        gradient = logits.to(self._tensors[1].dtype)
        for i, (hidden_sum, weight_sum) in enumerate(zip(self._hidden, self._weights, strict=True)):
            hidden, weight = self._tensors[2 * i : 2 * i + 2]
            # A token is in one chunk only: set its gradient. Every chunk has a part of the weights' gradients: add it.
            if hidden_sum is not None:
                hidden_sum[positions] = gradient @ weight
            if weight_sum is not None:
                _add_product(weight_sum, gradient.T, hidden[positions], beta=1)

    def results(self) -> Iterator[Tensor | None]:
        """Yield the gradients in autograd's order: hidden states and weight of each factor in turn."""
        for i, (hidden_sum, weight_sum) in enumerate(zip(self._hidden, self._weights, strict=True)):
            yield hidden_sum
            if weight_sum is None or self._main_gradients[i] is not None:
                yield None
            else:
                yield weight_sum.to(self._tensors[2 * i + 1].dtype)


def _weight_sum(weight: Tensor, main_gradient: Tensor | None) -> Tensor:
    """Return the tensor that sums the gradient of ``weight`` over chunks."""
    if main_gradient is not None:
        return main_gradient
    # A sum over chunks in bfloat16 would round away much of each chunk's contribution.
    return torch.zeros_like(weight, dtype=_sum_dtype(weight))


def _sum_dtype(weight: Tensor) -> torch.dtype:
    if weight.dtype == torch.float64:
        return torch.float64
    return torch.float32


def _add_product(out: Tensor, left: Tensor, right: Tensor, beta: int) -> Tensor:
    """Set ``out`` to beta out + left right. The dtype of ``out`` and of the sum may be wider than the factors'."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right, beta=beta)
    # From here on the dtype of ``out`` is wider than the factors' (float32 and bfloat16).
    if out.is_cuda:
        return torch.addmm(out, left, right, beta=beta, out_dtype=out.dtype, out=out)
    # On a CPU torch has no product with a wider sum. Convert ``right`` whole, and ``left`` one block of rows at a time.
    # To save memory the larger factor must be ``left``. If ``right`` is larger, compute the transposed product instead.
    if len(out) < out.shape[1]:
        return _add_product(out.T, right.T, left.T, beta).T
    right = right.to(out.dtype)
    step = max(1, BLOCK_BYTES // (out.itemsize * left.shape[1]))
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        out[rows].addmm_(left[rows].to(out.dtype), right, beta=beta)
    return out
