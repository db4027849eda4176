"""Distributions for sampling tokens, after temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Sampling = Callable[[Tensor], Tensor]
"""Logits [N, V] -> log-probabilities [N, V] of the sampled distribution; -inf for excluded tokens."""


def at_temperature(temperature: float) -> Sampling:
    """Return the transform softmax(logits / temperature)."""
    return lambda logits: (logits.double() / temperature).log_softmax(-1)


def nucleus(temperature: float, top_p: float) -> Sampling:
    """Return the top-p transform: keep the fewest tokens whose mass is at least ``top_p``, and renormalise."""

    def sampling(logits: Tensor) -> Tensor:
        log_probs, order = at_temperature(temperature)(logits).sort(-1, descending=True)
        mass_before = log_probs.exp().cumsum(-1) - log_probs.exp()
        log_probs_kept = torch.where(mass_before < top_p, log_probs, -torch.inf).log_softmax(-1)
        return torch.empty_like(log_probs_kept).scatter_(-1, order, log_probs_kept)

    return sampling


def most_probable(temperature: float, count: int) -> Sampling:
    """Return the top-k transform: keep the ``count`` most probable tokens, and renormalise."""

    def sampling(logits: Tensor) -> Tensor:
        threshold = logits.topk(count, -1).values[:, -1:]
        kept_logits = logits.double().masked_fill(logits < threshold, -torch.inf)
        return at_temperature(temperature)(kept_logits)

    return sampling


def normaliser_of_first(temperature: float, count: int) -> Sampling:
    """Return a transform whose normaliser sums over the first ``count`` ids only, as if a shard were missing."""

    def sampling(logits: Tensor) -> Tensor:
        scaled_logits = logits.double() / temperature
        return scaled_logits - scaled_logits[:, :count].logsumexp(-1, keepdim=True)

    return sampling


def first_tokens(temperature: float, count: int) -> Sampling:
    """Return the transform that samples from the first ``count`` ids of the vocabulary only."""
    normalise = normaliser_of_first(temperature, count)

    def sampling(logits: Tensor) -> Tensor:
        log_probs = normalise(logits)
        log_probs[:, count:] = -torch.inf
        return log_probs

    return sampling
