"""The dense float64 twin of ``policy_stats``: the whole vocabulary on one rank, written for
reading, differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.vocab_parallel.policy_stats import PolicyStats


def dense_policy_stats(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int,
    topk_ids: Tensor | None = None,
    with_entropy: bool = False,
) -> PolicyStats:
    """What ``policy_stats`` computes, from unsharded ``logits`` [T, >= vocab_size], in float64
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
