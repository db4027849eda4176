"""Round tensors to the values of a narrower type. The tensors keep their dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dppo.block_fp8 import LARGEST, round_activations
from megatron_dppo.model.quantization import is_quantized


def bfloat16(x: Tensor) -> Tensor:
    """Return the nearest bfloat16 values, in the dtype of ``x``."""
    return x.bfloat16().to(x.dtype)


def float8(x: Tensor) -> Tensor:
    """Return the nearest E4M3 values, in the dtype of ``x``, with one scale for each row; vectors stay as they are."""
    if x.dim() < 2:
        return x
    # The lower bound keeps the scale of a row of zeros above 0.
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def activations_in_block_fp8(model: nn.Module) -> Iterator[None]:
    """Inside the context, round the inputs of linear layers and experts of a transformers model, in blocks of 1 x 128.

    A linear layer that is not quantised (``is_quantized``) keeps its input. The forward pass raises ValueError if the
    width of an input is no multiple of 128.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.forward = MethodType(_experts_of_rounded_inputs, module)
                stack.callback(delattr, module, "forward")
            elif is_quantized(f"{name}.weight"):
                hook = module.register_forward_pre_hook(
                    lambda _, inputs: (round_activations(inputs[0]), *inputs[1:])
                )
                stack.callback(hook.remove)
        yield


def _experts_of_rounded_inputs(
    experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor
) -> Tensor:
    """Compute the forward pass of transformers' experts. Round the activations before each of the two products."""
    outputs = torch.zeros_like(hidden)
    rounded = round_activations(hidden)
    for expert in indices.unique().tolist():
        tokens, choices = torch.where(indices == expert)
        gate, up = (rounded[tokens] @ experts.gate_up_proj[expert].T).chunk(2, -1)
        inner = round_activations(experts.act_fn(gate) * up)
        product = inner @ experts.down_proj[expert].T
        outputs.index_add_(0, tokens, weights[tokens, choices, None] * product)
    return outputs
