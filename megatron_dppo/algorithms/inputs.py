"""What an algorithm may look at, token by token; and a response's advantage, of its reward against its group.

Legend: T = tokens, K = ids of TopK(mu); the last axis of the Top-K tensors is K + 1, the sampled
token last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.table import AdvantageName, AnchorName

SMALLEST_DEVIATION = 1e-6
"""Added to a group's standard deviation before it divides."""
PER_TOKEN = (
    "rollout_log_probs",
    "advantages",
    "loss_mask",
    "recomputed_log_probs",
    "entropy",
    "sequence_ids",
    "branch_ids",
    "tail_ids",
    "sum_squares",
    "step_bound",
)


@dataclass(frozen=True)
class TokenInputs:
    """Log-probabilities and advantages of T tokens; natural logarithms; any shape, the same for all
    but the Top-K tensors, which have one axis more.
    """

    log_probs: Tensor
    """log pi of the sampled token; the only tensor through which a gradient flows."""
    rollout_log_probs: Tensor
    """log mu, as the inference engine returned it."""
    advantages: Tensor
    """A."""
    loss_mask: Tensor
    """Bool: the token trains."""
    recomputed_log_probs: Tensor | None = None
    """log pi' of the trainer at the rollout's weights; None where no algorithm asked for it."""
    topk_log_probs: Tensor | None = None
    """``[..., K + 1]``: log pi at TopK(mu) and, last, at the sampled token."""
    rollout_topk_log_probs: Tensor | None = None
    """``[..., K + 1]``: log mu at the same ids."""
    topk_valid: Tensor | None = None
    """Bool ``[..., K + 1]``: False for padding, and for a sampled token that TopK(mu) holds."""
    entropy: Tensor | None = None
    """Of pi at the token's position, nats; None where it was not computed."""
    sequence_ids: Tensor | None = None
    """int64: tokens of one response share a number in ``0 .. T - 1``."""
    branch_ids: Tensor | None = None
    """The same of its branches, each a sequence that was sampled in order; None: each response is one."""
    tail_ids: Tensor | None = None
    """int64: ids of the vocabulary that TopK(mu) and the sampled token leave out; None where its size is not known."""
    sum_squares: Tensor | None = None
    """Sum over the vocabulary of pi^2; None where no algorithm asked for it."""
    step_bound: Tensor | None = None
    """What the algorithm's ``step_bound`` found of all tokens of the optimiser step, the same at each; None where no
    algorithm asked for it."""

    def __post_init__(self) -> None:
        shape = self.log_probs.shape
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(
                    f"TokenInputs.{name} has shape {tuple(value.shape)}, expected that of "
                    f"log_probs, {tuple(shape)}"
                )
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(
                f"TokenInputs.loss_mask is {self.loss_mask.dtype}, expected torch.bool"
            )
        self._check_topk()

    def _check_topk(self) -> None:
        parts = (self.topk_log_probs, self.rollout_topk_log_probs, self.topk_valid)
        if all(p is None for p in parts):
            return
        if any(p is None for p in parts):
            raise ValueError(
                "topk_log_probs, rollout_topk_log_probs and topk_valid come together; got "
                + ", ".join("None" if p is None else str(tuple(p.shape)) for p in parts)
            )
        shapes = {tuple(p.shape) for p in parts if p is not None}
        if len(shapes) != 1 or next(iter(shapes))[:-1] != tuple(self.log_probs.shape):
            raise ValueError(
                f"Top-K tensors have shapes {sorted(shapes)}, expected one shape "
                f"{tuple(self.log_probs.shape)} + (K + 1,)"
            )


Anchor = Callable[[TokenInputs], Tensor]
"""The log-probabilities that a mask compares pi with."""


def rollout(inputs: TokenInputs) -> Tensor:
    """Anchor mu: what the inference engine returned."""
    return inputs.rollout_log_probs


def recomputed(inputs: TokenInputs) -> Tensor:
    """Anchor pi': the trainer's own log-probabilities at the rollout's weights. ValueError where
    they are missing.
    """
    if inputs.recomputed_log_probs is None:
        raise ValueError("the mask is anchored on recomputed_log_probs, but TokenInputs has none")
    return inputs.recomputed_log_probs


ANCHORS: dict[AnchorName, Anchor] = {"rollout": rollout, "recomputed": recomputed}


def _sequence_ids(inputs: TokenInputs) -> Tensor:
    """int64 [T], flat. ValueError without them."""
    if inputs.sequence_ids is None:
        raise ValueError(
            "the algorithm works on whole sequences, but TokenInputs has no sequence_ids"
        )
    return inputs.sequence_ids.flatten()


# Reductions over responses. Only tokens in ``loss_mask`` count; a response must lie whole in the tensors, for prefixes
# and positions in order and without another's tokens between its own; results are float64, shaped as ``values``.
# Each is a function of the response alone. On a CPU, and of prefixes everywhere, its own tokens fix the order of
# operations; on a GPU a total has none, and its last bit of float64 may differ from rank to rank.


def of_branches(inputs: TokenInputs) -> TokenInputs:
    """``inputs`` whose sequences are branches: what stands before a token in its response may be of another branch, and
    sampled later."""
    if inputs.branch_ids is None:
        return inputs
    return replace(inputs, sequence_ids=inputs.branch_ids)


def sequence_totals(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Sum of ``values`` over each response, at all of its tokens. ValueError without sequence_ids."""
    ids = _sequence_ids(inputs)
    counted = torch.where(inputs.loss_mask, values, 0.0).double().flatten()
    # As many bins as tokens: an upper bound of the number of sequences that is known without asking
    # the device.
    totals = torch.zeros(ids.numel(), dtype=torch.float64, device=ids.device)
    return totals.index_add_(0, ids, counted)[ids].view_as(values)


def trained_tokens(inputs: TokenInputs) -> Tensor:
    """Tokens in ``loss_mask`` of the token's response, at least 1; float64."""
    return sequence_totals(inputs, torch.ones_like(inputs.log_probs)).clamp(min=1)


def sequence_means(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Mean of ``values`` over each response, at all of its tokens; 0 where none counts."""
    return sequence_totals(inputs, values) / trained_tokens(inputs)


def sequence_maxima(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Largest of ``values`` in each response, at all of its tokens; inf where one is NaN, -inf where none counts."""
    ids = _sequence_ids(inputs)
    values = torch.where(values.isnan(), torch.inf, values)
    counted = torch.where(inputs.loss_mask, values, -torch.inf).double().flatten()
    largest = torch.full_like(counted, -torch.inf)
    return largest.scatter_reduce_(0, ids, counted, "amax")[ids].view_as(values)


def sequence_quantile(inputs: TokenInputs, values: Tensor, share: float) -> Tensor:
    """The ``share`` quantile of ``values`` in each response, at all of its tokens; between two of them linear, as
    ``torch.quantile``. Of no use where none counts.
    """
    ids, counted = _sequence_ids(inputs), inputs.loss_mask.flatten()
    values_of = values.double().flatten()
    # What does not count gets a bin of its own, behind the others.
    bins = torch.where(counted, ids, ids.numel())
    order = values_of.argsort()
    order = order[bins[order].argsort(stable=True)]
    sizes = bins.new_zeros(ids.numel() + 1).index_add_(0, bins, torch.ones_like(bins))
    first = (sizes.cumsum(0) - sizes)[ids]
    place = share * (sizes[ids] - 1).clamp(min=0).double()
    below = place.floor()
    index = (first + below.long()).clamp(max=ids.numel() - 1)
    above = torch.minimum(index + 1, (first + sizes[ids] - 1).clamp(min=0))
    low, high = values_of[order[index]], values_of[order[above]]
    return (low + (place - below) * (high - low)).view_as(values)


def prefix_totals(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Sum of ``values`` over the response's tokens up to each token, itself included."""
    return _scan(inputs, values, 0.0, torch.add)


def prefix_minima(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Smallest of ``values`` among the response's tokens up to each token, itself included."""
    return _scan(inputs, values, torch.inf, torch.minimum)


def before(inputs: TokenInputs, prefix: Tensor, start: float) -> Tensor:
    """What ``prefix`` was at the token before, ``start`` at the first one of a response."""
    ids, flat = _sequence_ids(inputs), prefix.flatten()
    same = ids[1:] == ids[:-1]
    moved = torch.where(same, flat[:-1], start)
    return torch.cat([torch.full_like(flat[:1], start), moved]).view_as(prefix)


def _scan(
    inputs: TokenInputs, values: Tensor, neutral: float, combine: Callable[..., Tensor]
) -> Tensor:
    """Doubling windows: after k rounds a token holds what the last 2^k tokens of its response come to. So the order of
    additions depends on a token's place in its response and on nothing else in the pack.
    """
    ids = _sequence_ids(inputs)
    scanned = torch.where(inputs.loss_mask, values, neutral).double().flatten()
    step = 1
    while step < ids.numel():
        same = ids[step:] == ids[:-step]
        longer = torch.where(same, combine(scanned[step:], scanned[:-step]), scanned[step:])
        scanned = torch.cat([scanned[:step], longer])
        step *= 2
    return scanned.view_as(values)


def group_relative(
    rewards: Sequence[float] | Tensor, group_size: int, advantage: AdvantageName = "group-mean"
) -> Tensor:
    """A_i = R_i - mean of the rewards of its group; no division by the standard deviation (arXiv
    2602.04879, section 2).

    Args:
        rewards: ``[N]``; the responses of a prompt stand together, ``group_size`` of them.
        group_size: responses to a prompt.
        advantage: ``group-mean``: the mean includes the response itself; ``leave-one-out``: it is that of the others
            (RLOO, arXiv 2402.14740), which is G / (G - 1) times the first; ``group-standardized``: the first divided by
            the group's standard deviation (of G - 1 degrees of freedom) plus 1e-6 (GRPO, arXiv 2402.03300). A group of
            one has no others, and gets 0.

    Returns:
        float32 ``[N]``. A group whose rewards are all equal gets exactly 0.

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
    others = max(group_size - 1, 1)
    if advantage == "leave-one-out":
        centred = centred * (group_size / others)
    if advantage == "group-standardized":
        deviation = (centred.square().sum(1, keepdim=True) / others).sqrt()
        centred = centred / (deviation + SMALLEST_DEVIATION)
    # The mean's rounding would give a gradient to a group that has none.
    return torch.where(constant, 0.0, centred).flatten().float()


def turn_relative(
    returns: Sequence[Sequence[float]], group_size: int, advantage: AdvantageName = "group-mean"
) -> list[list[float]]:
    """A_ik = G_ik - mean over the group's j of G_j,min(k, K_j): a turn's return beside those of the others' turns of
    its number; a response that ended before counts with its last turn.

    ``returns``: by response G_i1 .. G_iK, what it earned from that turn on, as ``group_relative`` takes rewards. A_i1
    is what ``group_relative`` makes of the whole rewards. Where only last turns earn anything, so is every A_ik. With
    another ``advantage`` than the mean, the turns of a number are compared as ``group_relative`` says.
    """
    longest = max(map(len, returns), default=0)
    columns = [
        group_relative([g[min(k, len(g) - 1)] for g in returns], group_size, advantage).tolist()
        for k in range(longest)
    ]
    return [[columns[k][i] for k in range(len(g))] for i, g in enumerate(returns)]
