"""Logits with everything that kernels must get right, what they made of them, and their dense float64 twin.

Legend: T = tokens, C = columns with padding, V = true vocabulary, K = ids of TopK(mu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dppo.vocab_parallel import policy_stats
from megatron_dppo.vocab_parallel.policy_stats import dense_policy_stats

TEMPERATURE = 0.8
K = 20


@dataclass(frozen=True)
class KernelCase:
    """``logits`` [T, C], of which the columns from ``vocab`` on are padding; ``weights`` float64 [2, T]: dL/d log pi
    and dL/dH. The first row begins with a long run of -inf, and the third has no gradient."""

    logits: Tensor
    targets: Tensor
    topk: Tensor
    weights: Tensor
    vocab: int

    @classmethod
    def drawn(
        cls, tokens: int, vocab: int, padding: int, dtype: torch.dtype, device: torch.device
    ) -> KernelCase:
        """The same on every machine and rank."""
        seeded = torch.Generator().manual_seed(2)
        logits = (torch.randn(tokens, vocab + padding, generator=seeded) * 3).to(dtype)
        logits[0, : vocab // 2] = -math.inf
        # Whoever counts padding as tokens gets everything wrong.
        logits[:, vocab:] = 30.0
        targets = torch.randint(0, vocab, (tokens,), generator=seeded)
        targets[:3] = torch.tensor([vocab - 1, 0, vocab - 1])
        topk = torch.randint(0, vocab, (tokens, K), generator=seeded)
        # An id that was not recorded.
        topk[-1, -1] = -1
        weights = torch.randn(2, tokens, generator=seeded, dtype=torch.float64)
        weights[:, 2] = 0
        logits, targets, topk, weights = (x.to(device) for x in (logits, targets, topk, weights))
        return cls(logits, targets, topk, weights, vocab)

    def shard(self, rank: int, ranks: int) -> KernelCase:
        """A copy of the columns of a tensor-parallel rank; C must be a multiple of ``ranks``."""
        width = self.logits.shape[1] // ranks
        # Backward overwrites it.
        part = self.logits[:, rank * width : (rank + 1) * width].clone()
        return KernelCase(part, self.targets, self.topk, self.weights, self.vocab)


@dataclass(frozen=True)
class KernelErrors:
    """Largest errors against the twin, nats; ``gradient``: of the norm, relative; ``padding``: the largest gradient in
    padding or in the row without one."""

    log_prob: float
    topk: float
    entropy: float
    gradient: float
    padding: float


def errors(case: KernelCase, backend: str, group: dist.ProcessGroup | None = None) -> KernelErrors:
    """What ``backend`` makes of ``case``, against the twin. With ``group``: of this rank's shard."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    leaf = case.shard(rank, ranks).logits.requires_grad_()
    stats = policy_stats(
        leaf, case.targets, group, vocab_size=case.vocab, temperature=TEMPERATURE,
        topk_ids=case.topk, with_entropy=True, backend=backend,
    )  # fmt: skip
    assert stats.entropy is not None
    assert stats.topk_log_probs is not None
    (stats.log_probs * case.weights[0] + stats.entropy * case.weights[1]).sum().backward()
    whole = case.logits.double().requires_grad_()
    twin = dense_policy_stats(
        whole, case.targets, vocab_size=case.vocab, temperature=TEMPERATURE,
        topk_ids=case.topk, with_entropy=True,
    )  # fmt: skip
    assert twin.entropy is not None
    assert twin.topk_log_probs is not None
    (twin.log_probs * case.weights[0] + twin.entropy * case.weights[1]).sum().backward()
    assert leaf.grad is not None
    assert whole.grad is not None
    gradient, first = leaf.grad.double(), rank * leaf.shape[1]
    expected = whole.grad[:, first : first + leaf.shape[1]]
    padding = gradient[:, max(case.vocab - first, 0) :]
    return KernelErrors(
        _largest(stats.log_probs, twin.log_probs),
        _largest(stats.topk_log_probs, twin.topk_log_probs),
        _largest(stats.entropy, twin.entropy),
        float((gradient - expected).norm() / expected.norm()),
        float(torch.cat([gradient[2], padding.flatten()]).abs().max()),
    )


def _largest(values: Tensor, expected: Tensor) -> float:
    difference = (values.detach().double() - expected.detach()).abs()
    # -inf less -inf is no number, but two equal infinities differ by nothing
    return float(torch.where(values.double() == expected, 0.0, difference).max())
