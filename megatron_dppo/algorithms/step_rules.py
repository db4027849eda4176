"""Masks that depend on all tokens of an optimiser step. A pass without gradient first computes the step's bound from
all tokens. The mask then compares each token with the bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import Anchor, TokenInputs
from megatron_dppo.algorithms.rules import inward, log_ratio_to

StepTotal = Callable[[Tensor], Tensor]
"""Sums a tensor over the replicas, in place, and returns it."""

StepBound = Callable[[Tensor, Tensor, StepTotal], float]
"""(log r of this replica's trained tokens, their A, the sum over replicas) -> one number, the same on every rank.

The trained tokens are those of the whole optimiser step: of all micro-batches and packs.
"""


def step_bound_of(inputs: TokenInputs) -> Tensor:
    """Return the ``step_bound`` of ``inputs``. Raises ValueError if it is missing."""
    if inputs.step_bound is None:
        raise ValueError(
            "the mask looks at the whole optimiser step, but TokenInputs has no step_bound"
        )
    return inputs.step_bound


@torch.no_grad()
def outward_moment_cut(
    log_ratio: Tensor, advantages: Tensor, total: StepTotal, *, second_moment: float
) -> float:
    """Find the level c for which the mean of min((log r)^2, c) is the number ``second_moment``.

    The mean is over the tokens where the update moves pi further from the anchor. c is inf if the mean of (log r)^2
    over these tokens is at most ``second_moment``. Bisection finds c with at most 31 sums over the replicas.
    """
    squares = log_ratio.float().square().nan_to_num(nan=torch.inf)
    squares = squares[advantages.sign() * log_ratio > 0]
    own_count = torch.tensor(float(squares.numel()), dtype=torch.float64, device=squares.device)
    count = float(total(own_count))

    def is_within(cut: float) -> bool:
        own_sum = squares.clamp(max=cut).sum(dtype=torch.float64)
        return float(total(own_sum)) <= second_moment * count

    if is_within(torch.inf):
        return torch.inf
    return _largest_float32(is_within)


@torch.no_grad()
def second_moment_cut(
    log_ratio: Tensor, advantages: Tensor, total: StepTotal, *, second_moment: float
) -> float:
    """Find a cut for (log r)^2: tokens below the cut train, and their mean (log r)^2 is at most ``second_moment``.

    Among such cuts, the result is one at which the most tokens train; inf if all tokens train. Tokens with equal
    (log r)^2 all train, or all are blocked. Two bisections find the cut with at most 62 sums of two numbers over the
    replicas.
    """
    squares = log_ratio.float().square().nan_to_num(nan=torch.inf)

    def sum_and_count(cut: float) -> tuple[float, float]:
        """Return the sum and the number of the values up to ``cut``, over the tokens of all replicas."""
        is_below = squares <= cut
        own_sum = torch.where(is_below, squares, 0.0).sum(dtype=torch.float64)
        totals = total(torch.stack([own_sum, is_below.sum().double()])).tolist()
        return totals[0], totals[1]

    def is_within(cut: float) -> bool:
        moment, count = sum_and_count(cut)
        return moment <= second_moment * count

    highest = _largest_float32(is_within)
    _, trained_count = sum_and_count(highest)
    own_count = torch.tensor(float(squares.numel()), dtype=torch.float64, device=squares.device)
    if trained_count == total(own_count):
        return torch.inf

    def blocks_more(cut: float) -> bool:
        _, count = sum_and_count(cut)
        return count < trained_count

    # ``highest`` is just below the smallest value that is blocked, ``lowest`` just below the largest value that trains.
    # A cut halfway between separates the two values, also if the pass with gradient rounds a value differently.
    lowest = _largest_float32(blocks_more)
    return 0.5 * (highest + lowest)


def _largest_float32(holds: Callable[[float], bool]) -> float:
    """Find by bisection the largest finite float32 x at which ``holds(x)`` is True.

    ``holds`` must be True from 0 up to some number, and False above it.
    """
    low = 0
    high = int(torch.tensor(torch.finfo(torch.float32).max).view(torch.int32))
    while low < high:
        middle = (low + high + 1) // 2
        if holds(_float32_of_bits(middle)):
            low = middle
        else:
            high = middle - 1
    return _float32_of_bits(low)


def _float32_of_bits(bits: int) -> float:
    """Return the float32 that has the bits of the int32 ``bits``. Larger ``bits`` give a larger float32."""
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


@torch.no_grad()
def outward_moment(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """M2PO (arXiv 2510.01161) as its authors released it: block tokens where the update moves pi further away and
    (log r)^2 exceeds the cut of ``outward_moment_cut``.

    The mask is PPO's clip with the bounds e^-sqrt(cut) and e^sqrt(cut).

    Source: the authors' code (Infini-AI-Lab/M2PO, ``compute_m2po_policy_loss`` and its scripts), whose r is pi / mu as
    here. There are two differences. Their moment is over a micro-batch, so that their cut depends on packing; ours is
    over the optimiser step and all replicas. Their cut is 1e-12 less than the largest value of a token below the level
    c, so that the token with this value is clipped, too. Our cut is c itself, so that this token trains. All other
    tokens are treated alike. The paper's text was not read.
    """
    squares = log_ratio_to(inputs, anchor).double().square()
    return inward(inputs, anchor) | (squares <= step_bound_of(inputs))


@torch.no_grad()
def second_moment(inputs: TokenInputs, anchor: Anchor) -> Tensor:
    """M2PO as AReaL implements it: block the tokens with the largest (log r)^2, for either sign of A.

    The mask blocks as few tokens as possible, so that the mean of (log r)^2 over the remaining tokens of the optimiser
    step is at most ``second_moment`` (``second_moment_cut``).

    Sources: description and code of AReaL. Two differences: AReaL's mean is over a rank's part of the step, and its r
    is pi' / mu. ``outward_moment`` is the rule that the paper's authors released.
    """
    squares = log_ratio_to(inputs, anchor).double().square()
    return squares <= step_bound_of(inputs)
