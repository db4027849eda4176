"""What rewards and losses are measured against: a response's reward against its group, the tokens' summed loss against
one global denominator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs, trained_tokens
from megatron_dppo.algorithms.table import AggregationName


def group_relative(rewards: Sequence[float] | Tensor, group_size: int) -> Tensor:
    """A_i = R_i - mean of the rewards of its group; no division by the standard deviation (arXiv
    2602.04879, section 2).

    ``rewards`` ``[N]``: the responses of a prompt stand together, ``group_size`` of them; the mean
    includes the response itself. Returns float32 ``[N]``. A group whose rewards are all equal gets
    exactly 0.

    Raises ValueError where N is not a multiple of ``group_size``, or a reward is not finite.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"group_size is {group_size!r}, expected a whole number of at least 1")
    if values.ndim != 1 or values.numel() % group_size:
        raise ValueError(
            f"rewards have shape {tuple(values.shape)}, expected [N] with N a multiple of "
            f"group_size {group_size}"
        )
    if not values.isfinite().all():
        bad = values.isfinite().logical_not().nonzero().flatten().tolist()
        raise ValueError(f"rewards at positions {bad[:8]} are not finite")
    groups = values.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    constant = (groups == groups[:, :1]).all(1, keepdim=True)
    # The mean's rounding would give a gradient to a group that has none.
    return torch.where(constant, 0.0, centred).flatten().float()


@dataclass(frozen=True)
class Aggregation:
    """``denominator(lengths, constant)``: divides the sum over all tokens; ``lengths`` of the
    responses that train on any rank, in tokens. ``token_scale``: float64 factor of each token's
    loss before the sum; None: 1.

    Both are global counts or facts of one response, which always lies whole in a micro-batch: so
    the gradient does not depend on packing or on the layout.
    """

    denominator: Callable[[Sequence[int], float], float]
    token_scale: Callable[[TokenInputs], Tensor] | None = None


@torch.no_grad()
def one_over_length(inputs: TokenInputs) -> Tensor:
    """1 / (trained tokens of the token's response), float64."""
    return 1.0 / trained_tokens(inputs)


AGGREGATIONS: dict[AggregationName, Aggregation] = {
    "token-mean": Aggregation(lambda lengths, _: float(sum(lengths))),
    "sequence-mean-with-constant": Aggregation(lambda lengths, constant: len(lengths) * constant),
    "sequence-mean-token-sum": Aggregation(lambda lengths, _: float(len(lengths))),
    "sequence-mean-token-mean": Aggregation(
        lambda lengths, _: float(len(lengths)), one_over_length
    ),
}
"""``algorithm.aggregation`` -> what it does. ``sequence-mean-with-constant`` is Dr. GRPO's form,
``sequence-mean-token-mean`` GRPO's and GSPO's (arXiv 2507.18071, Eq. 5)."""
