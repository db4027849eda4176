"""Layer spec of torch modules with the parameter names of the Transformer Engine spec.

With these names, checkpoints, conversion and weight updates use the same code on CPU and GPU. The classes are
Megatron-Core's own (TransformerLayer, SelfAttention, MLP, MoELayer, TEGroupedMLP, tensor-parallel linears), except
attention's core, the norms and the linears that are defined here.

Legend of attention: T packed tokens, S sequences, H query heads and G key/value heads of this rank, D head size, E size
of a value, C context-parallel ranks, t = T / C tokens of each of these ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.model.layout import LayoutFault, LayoutSizes
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.context_parallel import gathered_rows
from megatron_dppo.trainer.padded_batches import PaddingPlan, padding_plan
from megatron_dppo.trainer.rms_norm import rms_norm


def packed_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: PaddingPlan, scale: float | None
) -> Tensor:
    """Compute softmax(q k^T * scale) v, causal within each sequence.

    q [T, H, D], k [T, G, D], v [T, G, E] -> [T, H, E].

    Padding comes after the tokens of its sequence, so under the causal mask no token attends to padding. The outputs of
    padding are dropped. So the gradient of padding is exactly zero.
    """
    outputs = []
    for batch in plan.batches:
        # [n, heads, longest, D]
        padded_q, padded_k, padded_v = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            padded_q, padded_k, padded_v, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).reshape(-1, q.shape[1], v.shape[2]))
    return torch.cat(outputs).index_select(0, plan.row_of_token)


def packed_attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PaddingPlan,
    scale: float | None,
    sinks: Tensor | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention within each sequence, with a sink in each head's softmax, or over a window, or both.

    o_i = sum_j exp(s_ij) v_j / (exp(b) + sum_j exp(s_ij)), with the logits s_ij = q_i k_j * scale and the sink b of the
    head. The sums run over the tokens j up to and including i: over the last ``window`` of these tokens, or over all of
    these tokens if ``window`` is None. The softmax is computed in fp32.

    q [T, H, D], k [T, G, D], v [T, G, E], sinks [H] -> [T, H, E].
    """
    heads = q.shape[1]
    groups = k.shape[1]
    if scale is None:
        scale = 1 / math.sqrt(q.shape[2])
    outputs = []
    for batch in plan.batches:
        # [n, heads, longest, D]
        padded_q, padded_k, padded_v = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        padded_k, padded_v = (x.repeat_interleave(heads // groups, 1) for x in (padded_k, padded_v))
        logits = (padded_q @ padded_k.transpose(2, 3)).float() * scale
        positions = torch.arange(batch.longest, device=q.device)
        distances = positions[:, None] - positions
        is_hidden = distances < 0
        if window is not None:
            is_hidden |= distances >= window
        logits = logits.masked_fill(is_hidden, -math.inf)
        if sinks is not None:
            sink_logits = sinks.float().view(1, heads, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink_logits], -1)
        shares = logits.softmax(-1)[..., : batch.longest]
        out = shares.to(v.dtype) @ padded_v
        outputs.append(out.transpose(1, 2).reshape(-1, heads, v.shape[2]))
    return torch.cat(outputs).index_select(0, plan.row_of_token)


class TorchAttention(MegatronModule):
    """Core attention that replaces Transformer Engine's: packed (thd) inputs, causal, no dropout.

    ``softmax_offset`` are the sinks of this rank's heads, if the model has sinks.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale
        self.context_group = pg_collection.cp
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            assert config.window_size is not None
            # Megatron-Core counts the tokens before the current token. This window also counts the current token.
            self.window = config.window_size[0] + 1
        self.softmax_offset = None
        self.tensor_group = pg_collection.tp
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: query [t, H, D], key [t, G, D], value [t, G, E] -> [t, H * E]."""
        assert packed_seq_params is not None, "sequences come packed"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        group = self.context_group
        plan = padding_plan(cu_seqlens)
        if group.size() > 1:
            rows = gathered_rows(cu_seqlens, query.shape[0] * group.size(), group.size())
            query, key, value = (
                _Exchange.apply(_even_heads(x, group.size()), rows, group, True)
                for x in (query, key, value)
            )
        if self.softmax_offset is None and self.window is None:
            output = packed_causal_attention(query, key, value, plan, self.scale)
        else:
            sinks = self._sinks_of_exchanged_heads()
            output = packed_attention_with_sinks(
                query, key, value, plan, self.scale, sinks, self.window
            )
        if group.size() > 1:
            output = _Exchange.apply(output, rows, group, False)
        return output.reshape(output.shape[0], -1)

    def _sinks_of_exchanged_heads(self) -> Tensor | None:
        """Return the sinks of the heads that this rank has after the exchange of tokens for heads."""
        if self.softmax_offset is None:
            return None
        return self.softmax_offset.chunk(self.context_group.size())[self.context_group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the sinks as a sharded tensor: tensor-parallel ranks divide them, as in Transformer Engine."""
        if self.softmax_offset is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def layout_faults(sizes: LayoutSizes, shape: ModelShape) -> Iterator[LayoutFault]:
    """Yield a fault if attention can't exchange heads for tokens under these sizes. The sizes must fit the model."""
    heads = shape.num_attention_heads // sizes.tensor
    if heads % sizes.context:
        expected_text = (
            f"a divisor of the {heads} attention heads of a tensor-parallel rank: layers of torch modules exchange "
            "heads for tokens"
        )
        yield LayoutFault("context", sizes.context, expected_text)


def _even_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat the heads of x [t, heads, D] until ``ranks`` divides their number."""
    repeats = math.lcm(x.shape[1], ranks) // x.shape[1]
    if repeats == 1:
        return x
    # Copies of a head are neighbours, so that a rank gets the key-value heads that its query heads need.
    return x.repeat_interleave(repeats, 1)


def _exchange_heads(x: Tensor, rows: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's tokens for a share of the heads of all tokens.

    [t, heads, D] -> [T, heads / C, D], in the pack's order. ``rows`` [T]: the pack's rows, rank by rank.
    """
    tokens, heads, size = x.shape
    ranks = group.size()
    sent = x.reshape(tokens, ranks, heads // ranks, size).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    flat = received.view(ranks * tokens, heads // ranks, size)
    return torch.empty_like(flat).index_copy_(0, rows, flat)


def _exchange_tokens(x: Tensor, rows: Tensor, group: ProcessGroup) -> Tensor:
    """Invert ``_exchange_heads``: [T, heads / C, D] -> [t, heads, D]."""
    ranks = group.size()
    sent = x.index_select(0, rows)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = received.view(ranks, -1, *x.shape[1:]).transpose(0, 1)
    return parts.reshape(parts.shape[0], -1, x.shape[2])


class _Exchange(torch.autograd.Function):
    """``_exchange_heads`` with its gradient, or else ``_exchange_tokens`` with its gradient: each inverts the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, group: ProcessGroup, of_heads: bool) -> Tensor:
        ctx.settings = rows, group, of_heads
        return (_exchange_heads if of_heads else _exchange_tokens)(x, rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows, group, of_heads = ctx.settings
        invert = _exchange_tokens if of_heads else _exchange_heads
        return invert(gradient, rows, group), None, None, None


class RMSNorm(torch.nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) with ``layernorm_zero_centered_gamma``.

    Under sequence parallelism Megatron sums the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.adds_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return rms_norm(x, self.weight, self.eps, adds_one=self.adds_one)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm (``layer_norm_weight``), then the linear; replaces TELayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_weight = norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        adds_one = self.config.layernorm_zero_centered_gamma
        eps = self.config.layernorm_epsilon
        normed = rms_norm(x, self.layer_norm_weight, eps, adds_one=adds_one)
        return super().forward(normed, *args, **kwargs)


class WholeLinear(torch.nn.Linear):
    """A linear without bias that is whole on every tensor-parallel rank; replaces TELinear in its mode "duplicated".

    Under sequence parallelism the input has only this rank's part of the tokens, and Megatron sums the weight's
    gradient over the tensor-parallel ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        **_: Any,
    ) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """x [..., in] -> ([..., out], None)."""
        return super().forward(x), None


class ColumnGroupedLinear(torch.nn.Module):
    """One linear ``weight<i>`` [out / ETP, in] for each local expert i, with ``bias<i>`` [out] or without; replaces
    TEColumnParallelGroupedLinear. With ``skip_bias_add`` the biases are returned instead of added.
    """

    partition_dim: ClassVar[int] = 0

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        pg_collection: Any,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.groups = pg_collection
        self.has_bias = bias
        self.skip_bias_add = skip_bias_add
        shape = [output_size, input_size]
        shape[self.partition_dim] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)
            set_tensor_model_parallel_attributes(
                weight, is_parallel=True, dim=self.partition_dim, stride=1
            )
            # Megatron's DDP reduces a parameter whose ``allreduce`` is False over expert-data ranks only.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{i}", weight)
            if bias:
                # Do not divide the bias: Megatron-Core rejects biases of experts that several ranks share.
                values = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
                values.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
                self.register_parameter(f"bias{i}", values)

    def forward(
        self, x: Tensor, m_splits: list[int]
    ) -> tuple[Tensor, list[torch.nn.Parameter] | None]:
        """Map x [tokens, in], sorted by expert with ``m_splits`` tokens each, to [tokens, out / ETP] and the biases
        that were not added."""
        parts = x.split(m_splits)
        biases: list[torch.nn.Parameter] = []
        if self.has_bias:
            biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        adds_biases = self.has_bias and not self.skip_bias_add
        outputs: list[Tensor] = []
        for expert, part in enumerate(parts):
            bias = biases[expert] if adds_biases else None
            outputs.append(F.linear(part, getattr(self, f"weight{expert}"), bias))
        if adds_biases or not biases:
            return torch.cat(outputs), None
        return torch.cat(outputs), biases

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return one sharded tensor for each expert along an expert axis, as in Transformer Engine."""
        n = self.num_gemms
        ep = self.groups.ep
        out = {}
        for i in range(n):
            expert = (len(sharded_offsets), ep.rank() * n + i, ep.size() * n)
            tensors = {"weight": getattr(self, f"weight{i}")}
            if self.has_bias:
                tensors["bias"] = getattr(self, f"bias{i}")
            sharded_tensors = make_sharded_tensors_for_checkpoint(
                tensors,
                prefix,
                {"weight": self.partition_dim},
                (*sharded_offsets, expert),
                tp_group=self.groups.expt_tp,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            )
            for name in tensors:
                sharded = sharded_tensors[f"{prefix}{name}"]
                # The helper numbers the replicas as for a dense layer. The replicas of experts are on other ranks.
                sharded.replica_id = (*sharded.replica_id[:2], self.groups.expt_dp.rank())
                out[f"{prefix}{name}{i}"] = sharded
        return out


class RowGroupedLinear(ColumnGroupedLinear):
    """One linear ``weight<i>`` [out, in / ETP] for each local expert; replaces
    TERowParallelGroupedLinear.
    """

    partition_dim: ClassVar[int] = 1


class TorchSpecProvider(LocalSpecProvider):
    """Selects the replacement of each Transformer Engine class."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return TorchAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type, MLPSubmodules]:
        return TEGroupedMLP, MLPSubmodules(
            linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear
        )


def decoder_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layer specs of this rank's chunk.

    ``config.moe_layer_freq`` selects dense or MoE layers, ``config.linear_attention_freq`` attention or delta nets.
    """
    provider = TorchSpecProvider()
    moe_layers = config.moe_layer_freq
    if isinstance(moe_layers, int):
        moe_layers = [int(i % config.moe_layer_freq == 0) for i in range(config.num_layers)]
    first_layer = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layer_specs = []
    for layer in range(first_layer, first_layer + count):
        is_moe = config.num_moe_experts is not None and bool(moe_layers[layer])
        delta_layers = config.linear_attention_freq
        is_delta = delta_layers is not None and bool(delta_layers[layer])
        layer_specs.append(_layer_spec(provider, config, is_moe=is_moe, is_delta=is_delta))
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=provider.layer_norm())


def _attention(provider: TorchSpecProvider, config: TransformerConfig) -> ModuleSpec:
    qk_norm = provider.layer_norm() if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def _latent_attention(provider: TorchSpecProvider, config: TransformerConfig) -> ModuleSpec:
    # The norms of the latents are parts of the linears that follow them, as in Transformer Engine's specification.
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=WholeLinear,
        linear_q_up_proj=provider.column_parallel_layer_norm_linear(),
        linear_kv_down_proj=WholeLinear,
        linear_kv_up_proj=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    return ModuleSpec(MLASelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def _delta_net(provider: TorchSpecProvider) -> ModuleSpec:
    submodules = GatedDeltaNetSubmodules(
        in_proj=provider.column_parallel_layer_norm_linear(),
        out_proj=provider.row_parallel_linear(),
    )
    return ModuleSpec(GatedDeltaNet, submodules=submodules)


def _layer_spec(
    provider: TorchSpecProvider, config: TransformerConfig, *, is_moe: bool, is_delta: bool
) -> ModuleSpec:
    # Linears that follow a norm contain the norm (NormColumnParallelLinear). The norm is a separate layer
    # only before a router and before latent attention.
    norm = provider.layer_norm()
    if is_delta:
        self_attention = _delta_net(provider)
    elif config.multi_latent_attention:
        self_attention = _latent_attention(provider, config)
    else:
        self_attention = _attention(provider, config)
    if is_moe:
        pre_mlp_norm = norm
        mlp = get_moe_module_spec_for_backend(
            provider, num_experts=config.num_moe_experts, moe_grouped_gemm=True
        )
    else:
        pre_mlp_norm = IdentityOp
        mlp = ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(
                linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear
            ),
        )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if config.multi_latent_attention else IdentityOp,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=pre_mlp_norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
