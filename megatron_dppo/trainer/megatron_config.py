"""Megatron-Core's configurations, built from the run's configuration and the model's shape, and their fields."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_dppo.config import forwarded
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.families import has_layer_parameter
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape, Router, YarnRopeScaling
from megatron_dppo.trainer import platform

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_DTYPES = {"model": None, "float32": torch.float32}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def transformer_config(
    config: PolicyConfig, shape: ModelShape, layout: Layout
) -> TransformerConfig:
    """Build the TransformerConfig of the run. Keys of the ``megatron`` table override all other options.

    Raises ValueError for a key of that table that is no field of TransformerConfig, or that another section sets.
    """
    dtype = DTYPES[config.model.dtype]
    moe_options = {}
    if shape.is_moe:
        moe_options = _moe_options(shape, replay=config.router_replay)
    adapter_options = {}
    if config.lora.rank:
        # The fusion adds the gradient of a Megatron linear's weight to DDP's buffer. Here these weights are frozen, and
        # frozen weights have no buffer. The adapters' linears are torch's, which do not use the fusion.
        adapter_options = {"gradient_accumulation_fusion": False}
    options = {
        **_model_options(shape),
        **moe_options,
        **_layout_options(layout, sequence_parallel=config.parallel.sizes.sequence_parallel(shape)),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_softmax_in_fp32": True,
        **_RECOMPUTE[config.training.recompute],
        "recompute_modules": list(platform.current().recomputed(shape.is_moe)),
        **platform.current().transformer_options,
        **_latent_options(shape),
        **_delta_options(shape),
        **_window_options(shape),
        **_limited_unit_options(shape),
        **adapter_options,
        **library_values(forwarded.MEGATRON, config.megatron),
    }
    config_class = TransformerConfig if shape.latent is None else MLATransformerConfig
    transformer = config_class(**options)
    transformer.finalize_model_grads_func = _sum_model_grads
    return transformer


def _sum_model_grads(chunks: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients over replicas as plain sums: the loss was divided before backward."""
    finalize_model_grads(chunks, None, **kwargs)


def _model_options(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "layernorm_zero_centered_gamma": shape.norms_add_one,
        "attention_output_gate": shape.gates_attention,
        "qk_layernorm": _has_head_norms(shape),
        "add_qkv_bias": has_layer_parameter(shape, "self_attention.linear_qkv.bias"),
        "add_bias_linear": shape.has_biases,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The loss is divided before the backward pass. With False Megatron-Core would also divide the
        # loss by the number of micro-batches.
        "calculate_per_token_loss": True,
    }


def _has_head_norms(shape: ModelShape) -> bool:
    """Return the value of Megatron-Core's ``qk_layernorm``: whether each head, or each of MLA's latents, has a norm."""
    if shape.norms_all_heads:
        # With the flag Megatron-Core would sum the weight's gradient over ranks with different parts of the weight.
        return False
    if shape.latent is not None:
        return True
    return has_layer_parameter(shape, "self_attention.q_layernorm.weight")


def _window_options(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of TransformerConfig for windows and sinks of attention, and for YaRN without latents."""
    options: dict[str, Any] = {}
    if shape.window is not None and shape.window.layers:
        # A token attends to at most these numbers of tokens before it and after it. The token itself is not counted.
        options["window_size"] = (shape.window.tokens - 1, 0)
        options["window_attn_skip_freq"] = [
            int(layer in shape.window.layers) for layer in range(shape.num_layers)
        ]
    if shape.has_sinks:
        options["softmax_type"] = "learnable"
    if shape.latent is None and isinstance(shape.rope_scaling, YarnRopeScaling):
        # YaRN multiplies rotated queries and keys by ``rotated_factor``, so that their product has the factor's square.
        # Megatron-Core's rotary embedding of packs does not multiply by the factor.
        options["softmax_scale"] = shape.rope_scaling.rotated_factor**2 / math.sqrt(shape.head_dim)
    return options


def _limited_unit_options(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of TransformerConfig for MLPs whose gated unit has a limit, and for experts with biases."""
    options: dict[str, Any] = {}
    if shape.glu_limit:
        options |= {
            "activation_func": quick_gelu,
            "activation_func_clamp_value": shape.glu_limit,
            "glu_linear_offset": 1.0,
        }
    if shape.is_moe and shape.has_biases:
        # Megatron-Core rejects this fusion for experts with biases.
        options["bias_dropout_fusion"] = False
    return options


def _delta_options(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of TransformerConfig for delta nets; empty for a model without delta nets."""
    delta = shape.delta
    if delta is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [
            int(layer in shape.delta_layers) for layer in range(shape.num_layers)
        ],
        "linear_conv_kernel_dim": delta.kernel_size,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def _latent_options(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of MLATransformerConfig; empty for a model without latent attention."""
    latent = shape.latent
    if latent is None:
        return {}
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_size,
        "qk_pos_emb_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rotary_base": shape.rope_theta,
        # Megatron-Core scales attention by the following three factors for every rope_type, so they are 1 without YaRN.
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    if isinstance(shape.rope_scaling, YarnRopeScaling):
        return options | _yarn_options(shape.rope_scaling)
    # Megatron-Core's fused kernel for MLA computes YaRN only.
    return options | {"apply_rope_fusion": False}


def _yarn_options(yarn: YarnRopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _moe_options(shape: ModelShape, *, replay: bool) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": _moe_layer_freq(shape),
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": shape.gates_shared_expert,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # A softmax over the chosen experts' logits equals the softmax over all experts' logits, normalised over the
        # chosen experts. So models with this normalisation need no softmax before the choice.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        **_router_options(shape.router),
        "moe_grouped_gemm": True,
        "moe_enable_routing_replay": replay,
    }


def _moe_layer_freq(shape: ModelShape) -> int | list[int]:
    """Return 1 if all layers have a router, else a list with 1 or 0 for each layer.

    Megatron-Core stacks the layers in checkpoints only if the value is 1.
    """
    if not shape.dense_layers:
        return 1
    return [int(layer in shape.moe_layers) for layer in range(shape.num_layers)]


def _router_options(router: Router) -> dict[str, Any]:
    options: dict[str, Any] = {
        "moe_router_score_function": router.score,
        "moe_router_enable_expert_bias": router.has_bias,
        # Megatron-Core would otherwise move the bias at every step of the optimizer.
        "moe_router_bias_update_rate": 0.0,
    }
    if router.groups > 1:
        options["moe_router_num_groups"] = router.groups
        options["moe_router_group_topk"] = router.chosen_groups
    if router.scale != 1:
        options["moe_router_topk_scaling_factor"] = router.scale
    return options


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """Return the sizes of ``layout`` under the names of Megatron-Core's process groups and configuration."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _layout_options(layout: Layout, *, sequence_parallel: bool) -> dict[str, Any]:
    return {
        **megatron_sizes(layout),
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "sequence_parallel": sequence_parallel,
        # Packed micro-batches differ in length; under an interleaved schedule the trainer makes them equal.
        "variable_seq_lengths": layout.pipeline > 1 and layout.chunks == 1,
        "deallocate_pipeline_outputs": layout.pipeline > 1,
        # This is the only dispatcher for unequal numbers of tokens. Megatron-Core checks it for dense models too.
        "moe_token_dispatcher_type": "alltoall",
    }


_CLASSES: Mapping[str, type] = {
    "megatron": TransformerConfig,
    "megatron_ddp": DistributedDataParallelConfig,
    "megatron_optimizer": OptimizerConfig,
}


class _Dtype(Enum):
    """The dtypes of tensors by the names that users write in a table."""

    float32 = torch.float32
    bfloat16 = torch.bfloat16


@functools.cache
def library_fields(table: str) -> forwarded.LibraryFields:
    """Return all fields of the Megatron-Core class that ``table`` configures, also inherited fields, with types."""
    library_class = _CLASSES[table]
    hints = get_type_hints(library_class)
    types = {field.name: hints[field.name] for field in dataclasses.fields(library_class)}
    for name, annotation in types.items():
        if annotation is torch.dtype:
            types[name] = _Dtype
    version = importlib.metadata.version("megatron-core")
    return forwarded.LibraryFields(f"{library_class.__name__} (megatron-core {version})", types)


def library_values(rules: forwarded.ForwardedTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``values`` of a table to the types of the library's fields. Names of enum members become the members.

    ``rules``: the rules of the table. Raises ValueError with a line for each key that is no field, or that another
    section sets, and for each value that does not fit.
    """
    fields = library_fields(rules.name)
    faults = [*rules.faults(values), *rules.library_faults(values, fields)]
    if faults:
        raise ValueError("\n".join(faults))
    read_values = {}
    for key, value in values.items():
        member = forwarded.read_value(fields.types[key], value)
        read_values[key] = member.value if isinstance(member, _Dtype) else member
    return read_values
