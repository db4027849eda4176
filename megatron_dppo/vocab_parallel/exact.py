"""The exact divergence of two policies from their vocab-parallel logits: a diagnostic and a
yardstick.

For what a mask sees cheaply, compare ``algorithms.divergence``. Legend: T = tokens, C = columns of
this rank's shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.vocab_parallel import wire
from megatron_dppo.vocab_parallel.backends import choose
from megatron_dppo.vocab_parallel.wire import VocabShard

BLOCK_ROWS = 16


@dataclass(frozen=True)
class ExactDivergence:
    """float64 [T] each, the same on every tensor-parallel rank; without gradient."""

    tv: Tensor
    """Half the sum over the vocabulary of |mu - pi|."""
    kl: Tensor
    """Sum over the vocabulary of mu log(mu / pi), nats."""


@torch.no_grad()
def exact_divergence(
    logits: Tensor,
    rollout_logits: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
) -> ExactDivergence:
    """TV and KL(mu || pi) over the whole vocabulary; pi from ``logits``, mu from
    ``rollout_logits``.

    Both [T, C]: this rank's columns, shards in rank order of ``group``, padding from ``vocab_size``
    on. Neither is changed. Three all-reduces: two of log-sum-exps, one of the sums. The dense twin
    is ``algorithms.divergence.exact_tv`` and ``exact_kl``. ValueError where the shapes differ.
    """
    if logits.shape != rollout_logits.shape or logits.ndim != 2:
        raise ValueError(
            f"logits {tuple(logits.shape)} and rollout_logits {tuple(rollout_logits.shape)}: "
            "expected one shape [T, C]"
        )
    shard, scale = VocabShard.of(logits.shape[1], vocab_size, group), 1.0 / temperature
    lse = [_lse(x, shard, scale, group) for x in (logits, rollout_logits)]
    sums = torch.zeros(len(logits), 2, dtype=torch.float64, device=logits.device)
    for start in range(0, len(logits), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        log_pi, log_mu = (
            x[rows, : shard.real].double() * scale - total[rows, None]
            for x, total in zip((logits, rollout_logits), lse, strict=True)
        )
        pi, mu = log_pi.exp(), log_mu.exp()
        sums[rows, 0] = 0.5 * (mu - pi).abs().sum(-1)
        sums[rows, 1] = torch.where(mu > 0, mu * (log_mu - log_pi), 0.0).sum(-1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return ExactDivergence(sums[:, 0], sums[:, 1].clamp(min=0))


def _lse(
    logits: Tensor, shard: VocabShard, scale: float, group: dist.ProcessGroup | None
) -> Tensor:
    """float64 [T]: over the whole vocabulary."""
    nothing = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    local, _, values = choose(logits).forward(logits, shard.real, scale, nothing, False)
    return wire.reduce_rows(shard, local, None, values, scale, group).lse
