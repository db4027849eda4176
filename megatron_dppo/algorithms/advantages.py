"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    return torch.where(constant, 0.0, centred).flatten().float()
