"""The loss of supervised training."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.algorithms.policy_loss import LossSums
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.sums import MetricSums


def negative_log_likelihood(log_probs: Tensor, loss_mask: Tensor) -> LossSums:
    """Compute -sum of log pi over the tokens that train, nats.

    The gradient flows through ``log_probs`` of the tokens that train. Other tokens may have any value, also NaN.

    Args:
        log_probs: Float ``[T]``.
        loss_mask: Bool ``[T]``.

    Returns:
        The loss. Its metric is the loss under ``loss/sum``.
    """
    loss = -torch.where(loss_mask, log_probs, 0.0).sum()
    return LossSums(loss, MetricSums(sums={metric_names.LOSS: loss.detach().double()}))
