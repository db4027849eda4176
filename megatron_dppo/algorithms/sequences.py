"""Sums over the trained tokens of each response, at every token of it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.algorithms.inputs import TokenInputs


def sequence_totals(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Sum of ``values`` over the tokens in ``loss_mask`` of each response, at all of its tokens.

    float64, shaped as ``values``. A response must lie whole in the tensors. ValueError without
    sequence_ids.
    """
    if inputs.sequence_ids is None:
        raise ValueError(
            "the algorithm works on whole sequences, but TokenInputs has no sequence_ids"
        )
    ids = inputs.sequence_ids.flatten()
    counted = torch.where(inputs.loss_mask, values, 0.0).double().flatten()
    # As many bins as tokens: an upper bound of the number of sequences that is known without asking
    # the device.
    totals = torch.zeros(ids.numel(), dtype=torch.float64, device=ids.device)
    return totals.index_add_(0, ids, counted)[ids].view_as(values)


def trained_tokens(inputs: TokenInputs) -> Tensor:
    """Tokens in ``loss_mask`` of the token's response, at least 1; float64."""
    return sequence_totals(inputs, torch.ones_like(inputs.log_probs)).clamp(min=1)
