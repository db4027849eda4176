"""An RMSNorm of queries, or of keys, over all heads. Megatron-Core's own RMSNorm norms each head separately.

The module is the same on CPUs and on GPUs. It has not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup


def norm_all_heads(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put an AllHeadsNorm for queries and an AllHeadsNorm for keys into every layer of ``block``."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = _norm_spec(config.num_attention_heads)
        attention.k_layernorm = _norm_spec(config.num_query_groups)


def _norm_spec(heads: int) -> ModuleSpec:
    return ModuleSpec(module=AllHeadsNorm, params={"heads": heads})


class AllHeadsNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, with the mean over the heads of all tensor-parallel ranks.

    Args:
        config: Megatron-Core's configuration of the model.
        hidden_size: size of a head.
        eps: epsilon of the norm.
        heads: heads of the whole model. This rank has a share of these heads, and the weights of its share.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int
    ) -> None:
        super().__init__()
        self.eps = eps
        self.elements = heads * hidden_size
        own_size = self.elements // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(own_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        # Megatron-Core must not sum this gradient over the tensor-parallel ranks, not even under sequence parallelism:
        # the ranks have different parts of the weight, and each rank's attention computes all tokens.
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., heads of this rank, head size] -> the same shape."""
        group = parallel_state.get_tensor_model_parallel_group()
        normed: Tensor = _Norm.apply(x, self.weight, self.eps, self.elements, group)
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the weight as a sharded tensor: tensor-parallel ranks divide its only dimension."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            # The caller always passes metadata with this group. ``or {}`` is only for the type checker.
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class _Norm(torch.autograd.Function):
    """RMS norm over the N elements (``elements``) of all heads.

    Let r = 1 / sqrt(sum(x^2) / N + eps) (``scale``) and n = r x (``normed``). The output is w n. If g is dL/d(output)
    (``gradient``), then

        dL/dx = r (w g - n sum(w g n) / N)        dL/dw = sum over tokens of g n

    The sums of x^2 and of w g n are over the heads of all ranks. Only x and r are saved: plain operations would save
    several fp32 copies of x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, elements: int, group: ProcessGroup
    ) -> Tensor:
        values = x.float()
        squares = _sum_over_heads(values.square(), group)
        scale = torch.rsqrt(squares / elements + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.elements = elements
        ctx.group = group
        return (values * scale * _by_head(weight, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        weighted_gradient = gradient.float() * _by_head(weight, x)
        mean = _sum_over_heads(weighted_gradient * normed, ctx.group) / ctx.elements
        input_gradient = (scale * (weighted_gradient - normed * mean)).to(x.dtype)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            # The last two dimensions are this rank's heads and the head size. Sum over all other dimensions.
            product = gradient.float() * normed
            weight_gradient = product.flatten(0, -3).sum(0).flatten().to(weight.dtype)
        return input_gradient, weight_gradient, None, None, None


def _by_head(weight: Tensor, x: Tensor) -> Tensor:
    """[heads * head size] -> [heads, head size], fp32, for ``x`` [..., heads, head size]."""
    return weight.float().view(x.shape[-2:])


def _sum_over_heads(values: Tensor, group: ProcessGroup) -> Tensor:
    """[..., heads, head size] -> [..., 1, 1]: the sum over the heads of all ranks of ``group``."""
    total = values.sum((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
