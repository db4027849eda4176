"""Maximum likelihood, in the form of a policy loss: what a warm start trains with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.metrics.sums import MetricSums


def negative_log_likelihood(log_probs: Tensor, loss_mask: Tensor) -> LossSums:
    """-sum of log pi over the tokens that train, nats; the gradient flows through ``log_probs``
    where a token trains, whatever stands elsewhere.

    ``log_probs`` float ``[T]``, ``loss_mask`` bool ``[T]``. Metrics: the sum under
    ``loss/sum``, the number of tokens under ``policy/tokens``.
    """
    loss = -torch.where(loss_mask, log_probs, 0.0).sum()
    sums = {"loss/sum": loss.detach().double(), "policy/tokens": loss_mask.sum().double()}
    return LossSums(loss, MetricSums(sums=sums))
