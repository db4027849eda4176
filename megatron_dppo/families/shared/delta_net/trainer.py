"""Gated delta nets on packed sequences. Megatron-Core's own forward pass rejects packed sequences.

Parameters and their division among tensor-parallel ranks are Megatron-Core's. The state of a head begins as zero at
every sequence of a pack. On a GPU with weights in bfloat16, one kernel of the library fla (flash-linear-attention)
computes all sequences; this has not yet run on a GPU. Otherwise torch computes batches of sequences of similar lengths.

Legend: T packed tokens, S sequences, K key heads and V value heads of this rank, D and E the sizes of their heads,
C = 2 K D + V E convolved channels, W tokens of the convolution.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_dppo.trainer.padded_batches import padding_plan
from megatron_dppo.trainer.sharded_sections import in_sections

_EPSILON = 1e-6
"""Epsilon of the norm of queries and keys. No configuration of a model sets this value."""

# Without fla, Megatron-Core's constructor raises an error. ``PackedDeltaNet`` works without fla, because it has its own
# forward pass.
gated_delta_net.HAVE_FLA = True


def use_packed_delta_nets(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put a PackedDeltaNet in the place of each delta net of ``block``, with its linears."""
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:
            linears = attention.submodules
            layer.submodules.self_attention = delta_net_spec(linears.in_proj, linears.out_proj)


def delta_net_spec(input_linear: type, output_linear: type) -> ModuleSpec:
    """Return the specification of a delta net with these linears. ``input_linear`` includes the layer's norm."""
    return ModuleSpec(
        PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=input_linear, out_norm=HeadNorm, out_proj=output_linear
        ),
        metainfo={"fuse_input_layernorm": True},
    )


class HeadNorm(torch.nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight of each value head, also in models whose other norms add 1 to the weight.

    Each tensor-parallel rank norms its own heads; Megatron sums the weight's gradient over the ranks. The weight is
    fp32, and is rounded to the type of ``x`` where it is used, as SGLang does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.keeps_dtype = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., head] -> the same shape."""
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class PackedDeltaNet(GatedDeltaNet):
    """A gated delta net for packed sequences."""

    def __init__(self, *args: Any, cp_comm_type: str | None = None, **kwargs: Any) -> None:
        # A layer passes ``cp_comm_type`` to every kind of attention; Megatron-Core's delta net does not accept it.
        super().__init__(*args, **kwargs)
        # Megatron-Core marks these parameters as divided among the tensor-parallel ranks, but does not say along which
        # dimension.
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.partition_dim = 0
            parameter.partition_stride = 1

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [T, 1, hidden] -> ([T, 1, hidden], None); with sequence parallelism this rank's part of T."""
        cu_seqlens = packed_seq_params.cu_seqlens_q
        projected, _ = self.in_proj(hidden_states)
        heads = self.num_v_heads_local_tp
        key_width = self.qk_dim // self.tp_size
        value_width = self.v_dim // self.tp_size
        widths = [self.conv_dim_local_tp, value_width, heads, heads]
        qkv, gates, beta_logits, decay_inputs = projected.squeeze(1).split(widths, -1)
        convolved = packed_convolution(qkv, self.conv1d.weight, cu_seqlens)
        q, k, v = convolved.split([key_width, key_width, value_width], -1)
        query = self._key_heads(q)
        key = self._key_heads(k)
        value = v.unflatten(-1, (heads, self.value_head_dim))
        steps = F.softplus(decay_inputs.float() + self.dt_bias.float())
        decay = -self.A_log.float().exp() * steps
        beta = beta_logits.float().sigmoid()
        output = packed_delta_rule(query, key, value, decay, beta, cu_seqlens)
        gated = self._apply_gated_norm(output, gates.unflatten(-1, (heads, self.value_head_dim)))
        result: tuple[Tensor, Tensor | None] = self.out_proj(gated.view(-1, 1, value_width))
        return result

    def _key_heads(self, x: Tensor) -> Tensor:
        """Split x [T, K D] into heads, norm each head, and repeat it for each of its value heads: [T, V, D]."""
        heads = x.unflatten(-1, (-1, self.key_head_dim))
        squared_norms = heads.float().square().sum(-1, keepdim=True)
        normed = heads.float() * torch.rsqrt(squared_norms + _EPSILON)
        values_per_key = self.num_value_heads // self.num_key_heads
        return normed.to(x.dtype).repeat_interleave(values_per_key, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict | None = None,
        tp_group: Any = None,
    ) -> ShardedStateDict:
        """Return Megatron-Core's state dict, with each fused parameter as one tensor of the checkpoint.

        The tensor is a stack of the parameter's whole sections. Megatron-Core stores the fused projections of an MLP
        like this, but Megatron-Core itself would store each section of a delta net's parameter as a separate tensor.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata, tp_group)
        key_width = self.qk_dim // self.tp_size
        value_width = self.v_dim // self.tp_size
        heads = self.num_v_heads_local_tp
        qkv_widths = (key_width, key_width, value_width)
        widths_of = {
            "in_proj.weight": (*qkv_widths, value_width, heads, heads),
            "conv1d.weight": qkv_widths,
        }
        group = {"tp_group": self.pg_collection.tp, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        for name, widths in widths_of.items():
            parameter = self.get_parameter(name)
            sharded = make_sharded_tensors_for_checkpoint(
                {name: parameter}, prefix, {name: 0}, sharded_offsets, **group
            )[prefix + name]
            state[prefix + name] = in_sections(
                sharded, widths, self.tp_size, self.pg_collection.tp.rank()
            )
        return state


def packed_convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Compute silu(causal convolution) of each channel in fp32: x [T, C], weight [C, 1, W] -> [T, C].

    W - 1 zeros are inserted before each sequence, so that a single convolution computes the whole pack.
    """
    tokens, channels = x.shape
    zeros = weight.shape[-1] - 1
    row = torch.arange(tokens, device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)
    # The convolution has W - 1 fewer outputs than inputs: output i is of the token at input i + W - 1.
    output_row = row + zeros * sequence
    spaced = x.new_zeros(tokens + zeros * (len(cu_seqlens) - 1), channels, dtype=torch.float32)
    spaced = spaced.index_copy(0, output_row + zeros, x.float())
    sums = F.conv1d(spaced.T[None], weight.float(), groups=channels)[0].T
    return F.silu(sums.index_select(0, output_row)).to(x.dtype)


def packed_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Apply the gated delta rule to each sequence of a pack.

    For each token the state M [D, E] of a head, zero before a sequence, becomes
    exp(decay) M + k outer beta (v - k exp(decay) M), and the output is q M / sqrt(D) with the new M.

    Args:
        query: [T, V, D], normed.
        key: [T, V, D], normed.
        value: [T, V, E].
        decay: logarithm of the factor exp(decay), fp32 [T, V].
        beta: fp32 [T, V].
        cu_seqlens: [S + 1], bounds of the sequences.

    Returns:
        [T, V, E], of the type of ``value``.
    """
    kernel = _fla_kernel() if value.is_cuda else None
    if kernel is not None and value.dtype is not torch.float32:
        inputs = (x[None].contiguous() for x in (query, key, value))
        output, _ = kernel(*inputs, g=decay[None], beta=beta[None], cu_seqlens=cu_seqlens.long())
        fused: Tensor = output[0]
        return fused
    plan = padding_plan(cu_seqlens)
    outputs = []
    for batch in plan.batches:
        q, k, v, g, b = map(batch.pad, (query, key, value, decay, beta))
        # Padding comes after the tokens of its sequence, and a token's output depends on no later position.
        output, _ = gated_delta_net.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=b)
        outputs.append(output.to(value.dtype).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.row_of_token)


@cache
def _fla_kernel() -> Any:
    """Return fla's kernel for packed sequences; None if the library is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule
