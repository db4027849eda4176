"""The inputs of an algorithm, token by token, and reductions of them over responses.

Legend: pi = the policy that trains, mu = the policy that sampled, T = tokens, TopK(mu) = the K most likely ids
under mu. The last axis of the Top-K tensors has K + 1 columns; the last column is the sampled token's.

The reductions over responses count only tokens in ``loss_mask``. The tensors must hold all tokens of a response.
Functions of prefixes and positions also need a response's tokens in order, without another response's tokens between
them. Results are float64, shaped as ``values``. A result depends on the response alone, not on the rest of the pack.
In prefix functions, the order of additions depends on the response alone. So their results are equal bit by bit on all
ranks. Totals and means are equal bit by bit only on CPUs. On a GPU the order of their additions varies, and the last
bit may differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.table import AnchorName

PER_TOKEN = (
    "rollout_log_probs",
    "advantages",
    "loss_mask",
    "recomputed_log_probs",
    "entropy",
    "sequence_ids",
    "branch_ids",
    "tail_ids",
    "sum_squares",
    "step_bound",
)
"""Names of the tensors of ``TokenInputs`` that have the shape of ``log_probs``."""


@dataclass(frozen=True)
class TokenInputs:
    """Log-probabilities (natural logarithms) and advantages of T tokens.

    All tensors have the same shape, which may be any shape. Only the Top-K tensors have one more axis.
    """

    log_probs: Tensor
    """log pi of the sampled token, with gradient."""
    rollout_log_probs: Tensor
    """log mu, as returned by the inference engine."""
    advantages: Tensor
    """A."""
    loss_mask: Tensor
    """Bool: the token counts in the loss, unless the algorithm's mask blocks it."""
    recomputed_log_probs: Tensor | None = None
    """log pi' of the trainer at the rollout's weights; None if the algorithm does not need it."""
    topk_log_probs: Tensor | None = None
    """``[..., K + 1]``: log pi at TopK(mu) and, last, at the sampled token. It has a gradient only for the algorithms
    in ``topk_terms.py``."""
    rollout_topk_log_probs: Tensor | None = None
    """``[..., K + 1]``: log mu at the ids of ``topk_log_probs``."""
    topk_valid: Tensor | None = None
    """Bool ``[..., K + 1]``: False for padding, and for a sampled token that TopK(mu) holds."""
    entropy: Tensor | None = None
    """Entropy of pi at the token's position, nats; None if it was not computed."""
    sequence_ids: Tensor | None = None
    """int64: tokens of one response share a number in ``0 .. T - 1``."""
    branch_ids: Tensor | None = None
    """int64: tokens of one branch share a number. The tokens of a branch were sampled one after another. None: each
    response is one branch."""
    tail_ids: Tensor | None = None
    """int64: the number of ids that are neither in TopK(mu) nor sampled; None if the vocabulary's size is unknown."""
    sum_squares: Tensor | None = None
    """Sum over the vocabulary of pi^2; None if the algorithm does not need it."""
    step_bound: Tensor | None = None
    """The number that the algorithm's ``step_bound`` computed from all tokens of the optimiser step, the same for each
    token; None if the algorithm has no ``step_bound``."""

    def __post_init__(self) -> None:
        shape = self.log_probs.shape
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"TokenInputs.{name} has shape {tuple(value.shape)}, expected the shape of "
                    f"log_probs, {tuple(shape)}"
                )
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(
                f"TokenInputs.loss_mask is {self.loss_mask.dtype}, expected torch.bool"
            )
        self._check_topk()

    def _check_topk(self) -> None:
        parts = (self.topk_log_probs, self.rollout_topk_log_probs, self.topk_valid)
        present_parts = [p for p in parts if p is not None]
        if not present_parts:
            return
        if len(present_parts) < len(parts):
            given_shapes = [None if part is None else tuple(part.shape) for part in parts]
            raise ValueError(
                "topk_log_probs, rollout_topk_log_probs and topk_valid come together; got "
                + ", ".join(map(str, given_shapes))
            )
        shapes = {tuple(p.shape) for p in present_parts}
        if len(shapes) != 1 or next(iter(shapes))[:-1] != tuple(self.log_probs.shape):
            raise ValueError(
                f"Top-K tensors have shapes {sorted(shapes)}, expected one shape "
                f"{tuple(self.log_probs.shape)} + (K + 1,)"
            )


Anchor = Callable[[TokenInputs], Tensor]
"""The log-probabilities that a mask compares pi with."""


def rollout(inputs: TokenInputs) -> Tensor:
    """Anchor mu: the log-probabilities that the inference engine returned."""
    return inputs.rollout_log_probs


def recomputed(inputs: TokenInputs) -> Tensor:
    """Anchor pi': the trainer's own log-probabilities at the rollout's weights. Raises ValueError without them."""
    if inputs.recomputed_log_probs is None:
        raise ValueError("the mask is anchored on recomputed_log_probs, but TokenInputs has none")
    return inputs.recomputed_log_probs


ANCHORS: dict[AnchorName, Anchor] = {"rollout": rollout, "recomputed": recomputed}


def _sequence_ids(inputs: TokenInputs) -> Tensor:
    """Return the sequence ids, flat, int64 [T]. Raises ValueError without them."""
    if inputs.sequence_ids is None:
        raise ValueError(
            "the algorithm works on whole sequences, but TokenInputs has no sequence_ids"
        )
    return inputs.sequence_ids.flatten()


def with_branches_as_sequences(inputs: TokenInputs) -> TokenInputs:
    """Return ``inputs`` with the numbers of branches in the place of sequence ids.

    Functions of prefixes need this: if a response has several branches, the tokens before a token may belong to another
    branch, and may have been sampled later than the token.
    """
    if inputs.branch_ids is None:
        return inputs
    return replace(inputs, sequence_ids=inputs.branch_ids)


def sequence_totals(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Sum ``values`` over each response; every token of the response gets the sum. Raises ValueError without
    sequence_ids."""
    ids = _sequence_ids(inputs)
    counted_values = torch.where(inputs.loss_mask, values, 0.0).double().flatten()
    # The number of tokens is an upper bound of the number of sequences. The exact number would need a device sync.
    totals = torch.zeros(ids.numel(), dtype=torch.float64, device=ids.device)
    return totals.index_add_(0, ids, counted_values)[ids].view_as(values)


def trained_tokens(inputs: TokenInputs) -> Tensor:
    """Count the tokens in ``loss_mask`` of each token's response, float64; at least 1."""
    return sequence_totals(inputs, torch.ones_like(inputs.log_probs)).clamp(min=1)


def sequence_means(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Average ``values`` over each response; every token gets its response's mean.

    The mean is 0 for a response without tokens in ``loss_mask``.
    """
    return sequence_totals(inputs, values) / trained_tokens(inputs)


def sequence_maxima(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Find the maximum of ``values`` in each response; every token gets its response's maximum.

    The maximum is inf for a response with a NaN, and -inf for a response without tokens in ``loss_mask``.
    """
    ids = _sequence_ids(inputs)
    values = torch.where(values.isnan(), torch.inf, values)
    counted_values = torch.where(inputs.loss_mask, values, -torch.inf).double().flatten()
    maxima = torch.full_like(counted_values, -torch.inf)
    return maxima.scatter_reduce_(0, ids, counted_values, "amax")[ids].view_as(values)


def sequence_quantile(inputs: TokenInputs, values: Tensor, share: float) -> Tensor:
    """Compute the ``share`` quantile of ``values`` in each response; every token gets its response's quantile.

    The quantile interpolates linearly between two values, as ``torch.quantile``. The result has no meaning for a
    response without tokens in ``loss_mask``.
    """
    ids = _sequence_ids(inputs)
    counted = inputs.loss_mask.flatten()
    flat_values = values.double().flatten()
    # Tokens outside ``loss_mask`` get one more bin, after the bins of all sequences.
    bins = torch.where(counted, ids, ids.numel())
    # Sort the tokens by value, then by bin. The second sort is stable, so each bin keeps the order of its values.
    order = flat_values.argsort()
    order = order[bins[order].argsort(stable=True)]
    sizes = bins.new_zeros(ids.numel() + 1).index_add_(0, bins, torch.ones_like(bins))
    # A bin begins in ``order`` after all tokens of the bins before it.
    start = (sizes.cumsum(0) - sizes)[ids]
    # ``rank`` is the position of the quantile among the sorted values of the response. It may lie between two values.
    rank = share * (sizes[ids] - 1).clamp(min=0).double()
    lower_rank = rank.floor()
    # The clamps keep the indices valid for an empty bin.
    lower_index = (start + lower_rank.long()).clamp(max=ids.numel() - 1)
    last_index = (start + sizes[ids] - 1).clamp(min=0)
    upper_index = torch.minimum(lower_index + 1, last_index)
    low = flat_values[order[lower_index]]
    high = flat_values[order[upper_index]]
    return (low + (rank - lower_rank) * (high - low)).view_as(values)


def prefix_totals(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Sum ``values`` over the response's tokens up to each token, itself included."""
    return _scan(inputs, values, 0.0, torch.add)


def prefix_minima(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Find the smallest of ``values`` among the response's tokens up to each token, itself included."""
    return _scan(inputs, values, torch.inf, torch.minimum)


def shift_by_one(inputs: TokenInputs, prefix: Tensor, start: float) -> Tensor:
    """Shift ``prefix`` by one token: each token gets its predecessor's value, a response's first token gets
    ``start``.
    """
    ids = _sequence_ids(inputs)
    flat = prefix.flatten()
    is_same_response = ids[1:] == ids[:-1]
    shifted = torch.where(is_same_response, flat[:-1], start)
    return torch.cat([torch.full_like(flat[:1], start), shifted]).view_as(prefix)


def _scan(
    inputs: TokenInputs, values: Tensor, neutral: float, combine: Callable[..., Tensor]
) -> Tensor:
    """Combine ``values`` over the response's tokens up to each token, with windows that double in length.

    After k rounds a token has the combination of the last 2^k tokens of its response, itself included. So the order of
    additions depends on a token's position in its response alone, and not on the rest of the pack.
    """
    ids = _sequence_ids(inputs)
    scanned = torch.where(inputs.loss_mask, values, neutral).double().flatten()
    step = 1
    while step < ids.numel():
        is_same_response = ids[step:] == ids[:-step]
        combined = combine(scanned[step:], scanned[:-step])
        combined = torch.where(is_same_response, combined, scanned[step:])
        scanned = torch.cat([scanned[:step], combined])
        step *= 2
    return scanned.view_as(values)
