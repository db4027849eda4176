"""The sum of one rank's experts on a CPU, and a check that the experts are supported.

SGLang's PyTorch function needs all experts on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class LocalExperts:
    """Replacement of SGLang's ``moe_forward_native`` that also works on a rank with only some of the experts.

    ``forward``: SGLang's function, for a rank with all experts.
    """

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        self._forward = forward

    def __call__(self, layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        """Return the sum of the outputs of this rank's experts, for each token."""
        if layer.moe_ep_size == 1:
            return self._forward(layer, x, topk_output, config)
        require_plain_experts(config, f"with ep_size {layer.moe_ep_size}")
        weights, experts, _ = topk_output
        return local_output(layer, x, weights, experts)


def require_plain_experts(config: Any, case: str) -> None:
    """Raise ValueError unless the activation is SiLU and the router's weights multiply the experts' outputs.

    ``case`` is a part of the message.
    """
    if config.gemm1_alpha is not None:
        raise ValueError(f"gpt-oss's experts {case}, expected ep_size 1 on a CPU")
    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise ValueError(
            f"experts with activation {config.activation!r} and apply_router_weight_on_input "
            f"{config.apply_router_weight_on_input} {case}, expected 'silu' and False on a CPU"
        )


def local_choices(experts: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert of this rank that a token has chosen, with the rows (tokens) and columns (choices) of
    ``experts`` that have the expert's number.

    Negative numbers are experts of other expert-parallel ranks. Those ranks add their outputs.
    """
    for expert in experts.unique().tolist():
        if expert >= 0:
            tokens, choices = torch.where(experts == expert)
            yield expert, tokens, choices


def local_output(layer: Any, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the sum of the outputs of this rank's experts, in the dtype of ``x``. Other ranks add their outputs.

    Args:
        layer: has the experts' weights, under SGLang's names.
        x: activations ``[tokens, hidden]``.
        weights: the router's weights ``[tokens, experts per token]``.
        experts: the experts' numbers on this rank, of the same shape; negative for experts of other ranks.
    """
    outputs = x.new_zeros(*experts.shape, x.shape[-1])
    for expert, tokens, choices in local_choices(experts):
        gate, up = F.linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        outputs[tokens, choices] = F.linear(F.silu(gate) * up, layer.w2_weight[expert])
    return (outputs.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
