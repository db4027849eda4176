"""How the tokens' losses become one number: a factor of each token, and one global denominator.

Both are global counts or facts of one response, which always lies whole in a micro-batch: so the
gradient does not depend on packing or on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs
from megatron_dppo.algorithms.sequences import trained_tokens


@dataclass(frozen=True)
class Aggregation:
    """``denominator(lengths, constant)``: divides the sum over all tokens; ``lengths`` of the
    responses that train on any rank, in tokens. ``token_scale``: float64 factor of each token's
    loss before the sum; None: 1.
    """

    denominator: Callable[[Sequence[int], float], float]
    token_scale: Callable[[TokenInputs], Tensor] | None = None


def _tokens(lengths: Sequence[int], constant: float) -> float:
    return float(sum(lengths))


def _sequences(lengths: Sequence[int], constant: float) -> float:
    return float(len(lengths))


def _sequences_times_constant(lengths: Sequence[int], constant: float) -> float:
    return len(lengths) * constant


@torch.no_grad()
def one_over_length(inputs: TokenInputs) -> Tensor:
    """1 / (trained tokens of the token's response), float64."""
    return 1.0 / trained_tokens(inputs)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(_tokens),
    "sequence-mean-with-constant": Aggregation(_sequences_times_constant),
    "sequence-mean-token-sum": Aggregation(_sequences),
    "sequence-mean-token-mean": Aggregation(_sequences, one_over_length),
}
"""``algorithm.aggregation`` -> what it does. ``sequence-mean-with-constant`` is Dr. GRPO's form,
``sequence-mean-token-mean`` GRPO's and GSPO's (arXiv 2507.18071, Eq. 5)."""
