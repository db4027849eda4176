"""Communication of tensor-parallel ranks: one packed all-reduce.

Row of the packed buffer, float32 (float64 for float64 logits), with N ranks:

    [ rank 0: lse high, lse low, (sum p log p), (sum p^2) | ... | rank N-1: ... |
      logit of the sampled token | logits at K ids ]

The row has a sum in parentheses only if the caller requests it. Each rank writes its own slots and the logits of the
ids that it owns, and zero elsewhere. So only one rank contributes to an element, and the all-reduce is exact,
independent of the order of reduction, and bit-identical on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of a vocabulary of ``vocab_size`` ids.

    The shard has ``columns`` ids from ``start`` on. The first ``real`` ids are tokens, the rest is padding.
    """

    start: int
    columns: int
    real: int
    vocab_size: int
    rank: int
    ranks: int

    @staticmethod
    def part(rank: int, ranks: int, columns: int, vocab_size: int) -> VocabShard:
        """Return the shard of ``rank``. Shards have equal sizes and are in rank order, and padding is last."""
        start = rank * columns
        real = min(max(vocab_size - start, 0), columns)
        return VocabShard(start, columns, real, vocab_size, rank, ranks)

    def local(self, ids: Tensor) -> Tensor:
        """Return the columns of ``ids`` in this shard; -1 for ids that another rank owns."""
        is_owned = (ids >= self.start) & (ids < self.start + self.real)
        return torch.where(is_owned, ids - self.start, -1)

    def unknown(self, ids: Tensor) -> Tensor:
        """Return for each id whether it is outside the vocabulary. No rank owns such an id."""
        return (ids < 0) | (ids >= self.vocab_size)


@dataclass(frozen=True)
class Reduced:
    """Reduced rows, the same on every rank.

    Attributes:
        lse: float64 [T], the log-sum-exp of all ids' scaled logits.
        others: float64 [T], the same of all ids except the sampled id.
        entropy: float64 [T], or None.
        squares: sum p^2, float64 [T], or None.
        logits: [T, 1 + K], at the sampled id and the K ids, not scaled.
    """

    lse: Tensor
    others: Tensor
    entropy: Tensor | None
    squares: Tensor | None
    logits: Tensor


def reduce_rows(
    shard: VocabShard,
    lse: Tensor,
    plogp: Tensor | None,
    squares: Tensor | None,
    owned_logits: Tensor,
    scale: float,
    group: dist.ProcessGroup | None,
) -> Reduced:
    """Combine the shards' rows (``backends.RowStats``), and then add the sampled token: the rows leave it out.

    ``lse``, ``plogp`` and ``squares`` are float64 [T]. ``owned_logits`` is [T, 1 + K], 0 for an id that another rank
    owns.
    """
    if shard.ranks == 1:
        return _with_sampled(lse, plogp, squares, owned_logits, scale)
    sums = [x for x in (plogp, squares) if x is not None]
    slots = 2 + len(sums)
    buffer = owned_logits.new_zeros(len(lse), shard.ranks * slots + owned_logits.shape[1])
    slot = buffer[:, shard.rank * slots : (shard.rank + 1) * slots]
    # Send the log-sum-exp as the sum of two floats. One float would have a rounding error of 1e-6, which would be in
    # every log-probability.
    slot[:, 0] = lse
    # A shard without any probability has an lse of -inf, and -inf minus -inf is NaN.
    slot[:, 1] = torch.where(lse.isfinite(), lse - slot[:, 0], 0.0)
    for column, values in enumerate(sums, 2):
        slot[:, column] = values
    buffer[:, shard.ranks * slots :] = owned_logits
    dist.all_reduce(buffer, group=group)
    shards = buffer[:, : shard.ranks * slots].double().view(-1, shard.ranks, slots)
    shard_lse = shards[..., 0] + shards[..., 1]
    merged = _merged(
        shard_lse,
        None if plogp is None else shards[..., 2],
        None if squares is None else shards[..., -1],
    )
    return _with_sampled(*merged, buffer[:, shard.ranks * slots :], scale)


def _with_sampled(
    other_lse: Tensor, plogp: Tensor | None, squares: Tensor | None, logits: Tensor, scale: float
) -> Reduced:
    """Merge the sums over all other tokens with the sampled token, ``logits[:, 0]``."""
    # Merge two parts of the vocabulary. The second part is the sampled token alone, so its p is 1, its p log p is 0 and
    # its p^2 is 1.
    lse_parts = torch.stack([other_lse, logits[:, 0].double() * scale], -1)
    plogp_parts = None
    if plogp is not None:
        plogp_parts = torch.stack([plogp, torch.zeros_like(plogp)], -1)
    square_parts = None
    if squares is not None:
        square_parts = torch.stack([squares, torch.ones_like(squares)], -1)
    lse, whole_plogp, whole_squares = _merged(lse_parts, plogp_parts, square_parts)
    entropy = None if whole_plogp is None else -whole_plogp
    return Reduced(lse, other_lse, entropy, whole_squares, logits)


def _merged(
    lse: Tensor, plogp: Tensor | None, squares: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Combine log-sum-exp, sum p log p and sum p^2 of N parts of a vocabulary, [T, N], into the three sums of the whole
    vocabulary, [T]. The p of a part sum to 1 in that part; the p of the result sum to 1 over the whole vocabulary.
    """
    total = lse.logsumexp(-1)
    log_share = lse - total[:, None]
    share = log_share.exp()
    if plogp is not None:
        # The logarithm of a share of 0 is -inf, and 0 times -inf is NaN.
        plogp = (share * (plogp + torch.where(share > 0, log_share, 0.0))).sum(-1)
    if squares is not None:
        squares = (share.square() * squares).sum(-1)
    return total, plogp, squares


def log_softmax_at(reduced: Reduced, scale: float) -> Tensor:
    """Compute log p at the sampled id and the K ids, float64 [T, 1 + K]; NaN in rows whose log-sum-exp is not finite.

    For the sampled id, log p is computed as -log(1 + e^(others - scale z)): its relative error is small also if p is
    nearly 1. For the K ids, log p is scale z - lse.
    """
    scaled_z = reduced.logits.double() * scale
    lse = reduced.lse[:, None]
    log_odds = reduced.others - scaled_z[:, 0]
    sampled = -torch.logaddexp(log_odds, torch.zeros_like(log_odds))
    value = torch.cat([sampled[:, None], scaled_z[:, 1:] - lse], 1)
    return torch.where(lse.isfinite(), value, math.nan)
