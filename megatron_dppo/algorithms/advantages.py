"""The advantage of a response or a turn: its reward compared with the rewards of its group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_dppo.algorithms.table import AdvantageName

SMALLEST_DEVIATION = 1e-6
"""Added to a group's standard deviation before the division."""


def group_relative(
    rewards: Sequence[float] | Tensor, group_size: int, advantage: AdvantageName = "group-mean"
) -> Tensor:
    """Compute the advantage A_i of each response i: its reward R_i minus the mean reward of its group.

    Args:
        rewards: ``[N]``, R. The responses to one prompt are a group, and their ``group_size`` rewards are consecutive.
        group_size: Number of responses to a prompt, G.
        advantage: ``group-mean``: the mean includes R_i, and nothing is divided by the standard deviation (arXiv
            2602.04879, section 2). ``leave-one-out``: the mean excludes R_i (RLOO, arXiv 2402.14740); the result is
            G / (G - 1) times ``group-mean``. ``group-standardized``: ``group-mean`` divided by the group's standard
            deviation (with G - 1 degrees of freedom) plus 1e-6 (GRPO, arXiv 2402.03300).

    Returns:
        float32 ``[N]``. A group whose rewards are all equal gets exactly 0; so does a group of one response.

    Raises:
        ValueError: ``group_size`` is below 1, N is not a multiple of it, or a reward is not finite.
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
        positions = values.isfinite().logical_not().nonzero().flatten().tolist()
        raise ValueError(f"rewards at positions {positions[:8]} are not finite")
    groups = values.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    is_constant = (groups == groups[:, :1]).all(1, keepdim=True)
    # G - 1, for "leave-one-out" and "group-standardized". A group of one response gets 0 below for any divisor.
    divisor = max(group_size - 1, 1)
    if advantage == "leave-one-out":
        centred = centred * (group_size / divisor)
    if advantage == "group-standardized":
        deviation = (centred.square().sum(1, keepdim=True) / divisor).sqrt()
        centred = centred / (deviation + SMALLEST_DEVIATION)
    # Rounding of the mean could leave small advantages in a group of equal rewards.
    return torch.where(is_constant, 0.0, centred).flatten().float()


def turn_relative(
    returns: Sequence[Sequence[float]], group_size: int, advantage: AdvantageName = "group-mean"
) -> list[list[float]]:
    """Compute the advantage A_ik of turn k of response i: its return G_ik compared with the group's returns of turn k.

    The return of a turn is the sum of the response's rewards from this turn on. A response with fewer than k turns
    counts with the return of its last turn. The comparison is ``group_relative``, with returns instead of rewards. So
    A_i1 equals ``group_relative`` of the total rewards. If only last turns have rewards, every A_ik equals A_i1.

    Args:
        returns: For each response i the list of its returns G_i1, G_i2 and so on, one for each turn. The order of
            responses is the same as in ``group_relative``.
        group_size: Number of responses to a prompt.
        advantage: As in ``group_relative``.
    """
    num_turns = max(map(len, returns), default=0)
    advantages: list[list[float]] = [[] for _ in returns]
    for k in range(num_turns):
        turn_returns = []
        for response_returns in returns:
            turn = min(k, len(response_returns) - 1)
            turn_returns.append(response_returns[turn])
        values = group_relative(turn_returns, group_size, advantage).tolist()
        for i, response_returns in enumerate(returns):
            if k < len(response_returns):
                advantages[i].append(values[i])
    return advantages
