"""The aggregation of token losses: a factor for each token's loss, and one global denominator for the sum of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms import table
from megatron_dppo.algorithms.inputs import TokenInputs, trained_tokens


@dataclass(frozen=True)
class Aggregation:
    """A rule that combines the losses of tokens into one loss.

    The denominator is a global count. A token's factor depends only on its response, and a response is never divided
    among micro-batches. So the gradient does not depend on packing or on the parallel layout.

    Attributes:
        denominator: (lengths, constant) -> the divisor of the sum over all tokens. ``lengths`` has the number of
            trained tokens of each response that trains, from all ranks. ``constant`` is
            ``algorithm.aggregation_constant``; if this key is not set, ``rollout.max_response_tokens``.
        token_scale: The factor of each token's loss before the sum, float64. None stands for 1.
    """

    denominator: Callable[[Sequence[int], float], float]
    token_scale: Callable[[TokenInputs], Tensor] | None = None


@torch.no_grad()
def one_over_length(inputs: TokenInputs) -> Tensor:
    """1 / (trained tokens of the token's response), float64."""
    return 1.0 / trained_tokens(inputs)


def _token_count(lengths: Sequence[int], constant: float) -> float:
    """Return the number of tokens that train."""
    return float(sum(lengths))


def _response_count(lengths: Sequence[int], constant: float) -> float:
    """Return the number of responses that train."""
    return float(len(lengths))


def _response_count_times_constant(lengths: Sequence[int], constant: float) -> float:
    return len(lengths) * constant


AGGREGATIONS: dict[table.AggregationName, Aggregation] = {
    "token-mean": Aggregation(_token_count),
    "sequence-mean-with-constant": Aggregation(_response_count_times_constant),
    "sequence-mean-token-sum": Aggregation(_response_count),
    "sequence-mean-token-mean": Aggregation(_response_count, one_over_length),
}
"""``algorithm.aggregation`` -> the aggregation. ``sequence-mean-with-constant`` is Dr. GRPO's form,
``sequence-mean-token-mean`` GRPO's and GSPO's (arXiv 2507.18071, Eq. 5)."""
