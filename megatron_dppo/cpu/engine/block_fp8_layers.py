"""Linear layers and experts with block-FP8 weights, emulated in fp32 (W8A8).

SGLang's kernels multiply e4m3 activations by e4m3 weights and sum in fp32. Here both are dequantised and multiplied in
fp32. Weights and activations are rounded as in the kernels, but the sums have another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.block_fp8 import dequantize, round_activations
from megatron_dppo.cpu.engine.local_experts import local_choices, require_plain_experts
from megatron_dppo.model.quantization import BLOCK


def dispatch_linear(
    weight_block_size: Sequence[int] | None = None, act_scale_ue8m0: bool = False
) -> Callable[..., Tensor]:
    """Return the function of a linear layer. Replaces SGLang's ``dispatch_w8a8_block_fp8_linear``.

    Raises ValueError for another kind of FP8 than blocks of 128 x 128 with fp32 scales.
    """
    if list(weight_block_size or ()) != [BLOCK, BLOCK] or act_scale_ue8m0:
        raise ValueError(
            f"quantization_config has weight_block_size {weight_block_size} and "
            f"{'UE8M0' if act_scale_ue8m0 else 'fp32'} scales, expected [{BLOCK}, {BLOCK}] and fp32 scales on a CPU"
        )
    return linear


def linear(
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + b, in the dtype of ``input`` ``[..., k]``; ``weight`` e4m3 ``[n, k]``."""
    output = _product(input.reshape(-1, input.shape[-1]), weight, weight_scale)
    if bias is not None:
        output += bias
    return output.view(*input.shape[:-1], -1)


def apply_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Compute the experts of a layer. Replaces SGLang's ``Fp8MoEMethod.apply``."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    require_plain_experts(method.moe_runner_config, "with block-FP8 weights")
    weights, experts, _ = dispatch_output.topk_output
    output = experts_output(layer, dispatch_output.hidden_states, weights, experts)
    return StandardCombineInput(hidden_states=output)


def experts_output(layer: Any, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Return the sum of the chosen experts' outputs, in the dtype of ``x``.

    As in SGLang's Triton kernels, each of the two products is rounded to the dtype of ``x``. The second product is
    multiplied by the router's weight before it is rounded.

    Args:
        layer: has the experts' weights and scales, under SGLang's names.
        x: activations ``[tokens, hidden]``.
        weights: the router's weights ``[tokens, experts per token]``.
        experts: the experts' numbers on this rank, of the same shape; negative for experts of other ranks.
    """
    outputs = x.new_zeros(*experts.shape, x.shape[-1])
    for expert, tokens, choices in local_choices(experts):
        gate_up = _product(x[tokens], layer.w13_weight[expert], layer.w13_weight_scale_inv[expert])
        gate, up = gate_up.float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        outputs[tokens, choices] = _product(
            hidden,
            layer.w2_weight[expert],
            layer.w2_weight_scale_inv[expert],
            row_factors=weights[tokens, choices, None],
        )
    return outputs.float().sum(1).to(x.dtype)


def _product(
    x: Tensor, values: Tensor, scales: Tensor, row_factors: Tensor | None = None
) -> Tensor:
    """Return x W^T, multiplied by ``row_factors`` ``[rows, 1]``, in the dtype of ``x`` ``[rows, k]``."""
    # The weights are dequantised in each call: a copy that is kept would be stale after a weight update.
    product = torch.mm(round_activations(x), dequantize(values, scales).T)
    if row_factors is not None:
        product *= row_factors
    return product.to(x.dtype)
