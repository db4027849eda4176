"""TRIAGE (arXiv 2610.07043): a gate on the weight, and a repair term.

Gate and repair term act on segments of a response in which engine and trainer disagree and the update would increase
the disagreement. The tensors must hold all tokens of a response, as for ``sequence_rules.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import (
    Anchor,
    TokenInputs,
    prefix_totals,
    sequence_means,
    sequence_totals,
    with_branches_as_sequences,
)
from megatron_dppo.algorithms.rules import importance_ratio

GATE_TIERS = ((-0.5, 0.3), (-1.5, 0.1))
"""(bound, weight). If a segment's mean of log pi' - log mu is below a bound, the segment has the bound's weight. If the
mean is below both bounds, the segment has the smaller weight."""
TAIL_GAP = -6.0
"""Tokens with log pi' - log mu below this are in the tail. Two tail tokens give their segment the smallest weight."""
REPAIR_TARGET = -0.03
"""The repair term acts on segments whose mean of log pi - log mu is below this."""
REPAIR_SCALE = math.sqrt(0.0005)
"""beta. The slope of the repair term is at most beta times the term's coefficient (``repair``)."""


def _segments(inputs: TokenInputs, size: int) -> TokenInputs:
    """Return ``inputs`` with the numbers of segments in the place of sequence ids. A segment has ``size`` trained
    tokens of a branch; the last segment of a branch may be shorter.
    """
    inputs = with_branches_as_sequences(inputs)
    assert inputs.sequence_ids is not None
    # Tokens before the first trained token have the position -1; they join the first segment.
    position = prefix_totals(inputs, torch.ones_like(inputs.log_probs)) - 1
    number = (position.clamp(min=0) / size).floor().flatten()
    ids = inputs.sequence_ids.flatten()
    is_start = (ids.diff() != 0) | (number.diff() != 0)
    segment_ids = torch.nn.functional.pad(is_start.long().cumsum(0), (1, 0))
    return replace(inputs, sequence_ids=segment_ids.view_as(inputs.sequence_ids))


@torch.no_grad()
def gated_ratio(inputs: TokenInputs, anchor: Anchor, *, gate_segment: float) -> Tensor:
    """w = g r, with TRIAGE's gate g.

    Segments have ``gate_segment`` tokens. g is 1 unless the token has pi' < mu and its segment has a negative mean
    advantage: for such tokens, lowering pi increases the gap. Their g is the smaller of two numbers: the weight of the
    segment's mean of log pi' - log mu (``GATE_TIERS``), and 1 - 0.9 min(k / 2, 1), where k counts the segment's tokens
    in the tail (``TAIL_GAP``).

    Source: the authors' description of their code and its default numbers (InfiXAI/TRIAGE, METHODS and TRAINING). Their
    code has options for the tokens that the gate and the repair term act on. The options of their reported runs are
    used here: ``q3`` and ``adv_positive``. There are two differences. Their ratio is pi / pi' times min(pi' / mu, 2),
    ours is r = pi / mu with the cap. They divide the loss by the sum of the weights, we divide it by the aggregation's
    count. The paper's text was not read.
    """
    segments = _segments(inputs, int(gate_segment))
    gap = (anchor(inputs) - inputs.rollout_log_probs).double()
    mean = sequence_means(segments, gap)
    advantage = sequence_means(segments, inputs.advantages)
    gate = torch.ones_like(gap)
    for bound, weight in GATE_TIERS:
        gate = torch.where(mean < bound, weight, gate)
    tail_tokens = sequence_totals(segments, (gap < TAIL_GAP).double())
    gate = torch.minimum(gate, 1 - 0.9 * (tail_tokens / 2).clamp(max=1))
    gate = torch.where((advantage < 0) & (gap < 0), gate, 1.0)
    return importance_ratio(inputs, anchor) * gate.to(inputs.log_probs.dtype)


@torch.no_grad()
def repair(
    inputs: TokenInputs, anchor: Anchor, *, repair_segment: float, repair: float
) -> tuple[Tensor, Tensor]:
    """Compute TRIAGE's repair term at each token, and the derivative of the term's total by each token's log pi.

    The term is ``repair`` times beta^2 (sqrt(1 + (q / beta)^2) - 1), with q = max(target - d, 0). d is the mean of
    log pi - log mu over the token's segment of ``repair_segment`` tokens, target is REPAIR_TARGET, and beta is
    REPAIR_SCALE. The term is 0 in segments whose mean advantage is not positive. The total is the sum of the term over
    all tokens. Its derivative is at most ``repair`` times beta in size.

    The authors average the term over the segments of the whole update. Here each token has its segment's value, and
    ``token-mean`` averages over tokens. Both means are equal if all segments have equally many tokens. A shorter last
    segment counts less here. Sources: as for ``gated_ratio``.
    """
    segments = _segments(inputs, int(repair_segment))
    gap = (inputs.log_probs - inputs.rollout_log_probs).double()
    mean = sequence_means(segments, gap)
    advantage = sequence_means(segments, inputs.advantages)
    deficit = torch.where(advantage > 0, REPAIR_TARGET - mean, 0.0).clamp(min=0)
    # A NaN at one token makes its segment's mean NaN. A segment with a NaN gets no repair.
    deficit = torch.where(deficit.isfinite(), deficit, 0.0)
    root = (1 + (deficit / REPAIR_SCALE).square()).sqrt()
    return repair * REPAIR_SCALE**2 * (root - 1), -repair * deficit / root
