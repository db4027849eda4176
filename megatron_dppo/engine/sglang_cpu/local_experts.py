"""Experts of an expert-parallel rank, which SGLang's PyTorch function for a CPU does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class LocalExperts:
    """SGLang's ``moe_forward_native``, ``forward``, and its part for a rank that has some of the experts only."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        """Return the sum of the outputs of this rank's experts, for each token."""
        if layer.moe_ep_size == 1:
            return self._forward(layer, x, topk_output, config)
        if config.activation != "silu" or config.apply_router_weight_on_input:
            raise ValueError(
                f"experts with activation {config.activation!r} and apply_router_weight_on_input "
                f"{config.apply_router_weight_on_input} with ep_size {layer.moe_ep_size}, expected 'silu' and False "
                "on a CPU"
            )
        weights, experts, _ = topk_output
        return local_output(layer, x, weights, experts)


def local_output(layer: Any, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the sum of the outputs of this rank's experts, in the dtype of ``x``; other ranks add theirs.

    Args:
        layer: has the experts' weights, under SGLang's names.
        x: activations ``[tokens, hidden]``.
        weights: the router's weights ``[tokens, experts per token]``.
        experts: the experts' numbers on this rank, of the same shape; negative for those of other ranks.
    """
    outputs = x.new_zeros(*experts.shape, x.shape[-1])
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        tokens, choices = torch.where(experts == expert)
        gate, up = F.linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        outputs[tokens, choices] = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
    return (outputs.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
