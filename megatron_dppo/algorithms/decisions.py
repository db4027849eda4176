"""The decision about each token: whether it trains, and its weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.algorithm import Algorithm
from megatron_dppo.algorithms.inputs import TokenInputs


@dataclass(frozen=True)
class Decisions:
    """Decisions per token, shaped as ``log_probs``, without gradient.

    Attributes:
        trains: Bool; the token is in ``loss_mask``, finite, and not blocked by the mask.
        finite: Bool; every number that the algorithm reads at the token is finite.
        weight: w, the importance weight of the algorithm.
        capped: min(w, C) with the algorithm's cap C.
    """

    trains: Tensor
    finite: Tensor
    weight: Tensor
    capped: Tensor


@torch.no_grad()
def decide(algorithm: Algorithm, inputs: TokenInputs) -> Decisions:
    """Decide for each token whether it trains, and compute its weight.

    A token is blocked, for either sign of A, if a number that the algorithm reads is not finite. All algorithms read
    log pi, log mu, their penalties and the capped weight. Some also read log pi', or the valid Top-K columns. If a
    ratio overflows to infinity, a finite cap cuts it, and the token may train. Without a finite cap the token is
    blocked.
    """
    weight = algorithm.weight(inputs)
    capped = weight.clamp(max=algorithm.ratio_cap)
    finite = _are_numbers_finite(algorithm, inputs) & capped.isfinite()
    trains = algorithm.mask(inputs) & inputs.loss_mask & finite
    return Decisions(trains, finite, weight, capped)


def _are_numbers_finite(algorithm: Algorithm, inputs: TokenInputs) -> Tensor:
    """Return True where all penalties, and all log-probabilities that the algorithm reads, are finite."""
    # A difference of two log-probabilities is finite only if both are finite.
    log_ratio = inputs.log_probs - inputs.rollout_log_probs
    finite = log_ratio.isfinite()
    for _, term in algorithm.penalties:
        value, _ = term(log_ratio)
        finite = finite & value.isfinite()
    if algorithm.needs_recomputed and inputs.recomputed_log_probs is not None:
        finite = finite & inputs.recomputed_log_probs.isfinite()
    if algorithm.reads_topk and inputs.topk_valid is not None:
        assert inputs.topk_log_probs is not None
        assert inputs.rollout_topk_log_probs is not None
        differences = inputs.topk_log_probs - inputs.rollout_topk_log_probs
        finite = finite & (differences.isfinite() | ~inputs.topk_valid).all(-1)
    return finite
