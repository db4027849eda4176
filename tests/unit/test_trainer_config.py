"""TransformerConfig of each family and layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.config import schema as s
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import LatentAttention, ModelShape, Router, YarnRopeScaling
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.megatron_config import transformer_config
from tests.small_shapes import DENSE, MOE


def config(parallel: dict[str, Any], **sections: Any) -> s.PolicyConfig:
    return s.PolicyConfig(
        run=s.RunConfig(directory="unused", steps=1),
        model=s.ModelConfig(hf_checkpoint="unused", dtype=sections.get("dtype", "float32")),
        training=s.StepConfig(micro_batch_tokens=64, recompute=sections.get("recompute", "none")),
        optimizer=s.OptimizerConfig(lr=1e-3),
        parallel=s.ParallelConfig(**parallel),
        megatron=sections.get("megatron", {}),
        lora=sections.get("lora", s.LoraConfig()),
    )


def build(shape: ModelShape, parallel: dict[str, Any], **sections: Any):
    c = config(parallel, **sections)
    return transformer_config(c, shape, Layout.of(c.parallel.sizes))


def test_mixture_of_experts_routes_as_transformers_does() -> None:
    t = build(MOE, {})
    assert (t.num_moe_experts, t.moe_router_topk, t.moe_ffn_hidden_size) == (8, 2, 32)
    assert (t.moe_router_load_balancing_type, t.moe_aux_loss_coeff) == ("none", 0.0)
    assert (t.moe_router_dtype, t.moe_router_score_function) == ("fp32", "softmax")
    assert not t.moe_router_pre_softmax
    assert build(replace(MOE, norm_topk_prob=False), {}).moe_router_pre_softmax
    assert t.qk_layernorm
    assert not t.add_qkv_bias
    assert t.calculate_per_token_loss


@pytest.mark.parametrize(
    ("has_te", "kernel", "library"),
    [
        (True, False, "Transformer Engine"),
        (True, True, "Transformer Engine"),
        (False, True, "apex"),
        (False, False, None),
    ],
)
def test_weight_gradients_are_accumulated_in_fp32_where_a_library_does(
    monkeypatch, has_te, kernel, library
):
    """This holds on GPUs, and never with adapters: their frozen weights have no gradients."""
    from megatron.core.tensor_parallel import layers

    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setitem(sys.modules, name, ModuleType(name) if kernel else None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(platform, "has_transformer_engine", lambda: has_te)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    on_gpus = platform._cuda()
    assert platform.fused_weight_gradients() == library
    # Megatron-Core's output layer asks for apex, whose kernel the trainer never calls.
    assert layers._grad_accum_fusion_available is has_te
    key = "gradient_accumulation_fusion"
    options = {key: on_gpus.transformer_options[key]}  # the others need Transformer Engine
    gpu_platform = replace(on_gpus, transformer_options=options)
    monkeypatch.setattr(platform, "current", lambda: gpu_platform)
    assert build(MOE, {}).gradient_accumulation_fusion is (library is not None)
    assert not build(MOE, {}, lora=s.LoraConfig(rank=2)).gradient_accumulation_fusion
    assert not build(MOE, {}, megatron={key: False}).gradient_accumulation_fusion


def test_on_cpus_weight_gradients_are_added_without_it(monkeypatch):
    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not build(MOE, {}).gradient_accumulation_fusion


def test_qwen2_has_biases_and_no_qk_norm() -> None:
    t = build(DENSE, {})
    assert t.add_qkv_bias
    assert not t.qk_layernorm
    assert t.num_moe_experts is None


def test_a_shared_expert_has_its_width_and_its_gate() -> None:
    shared: dict[str, Any] = {"shared_ffn_hidden_size": 96, "gates_shared_expert": True}
    t = build(replace(MOE, family="qwen2_moe", **shared), {})
    assert (t.moe_shared_expert_intermediate_size, t.moe_shared_expert_gate) == (96, True)
    assert t.add_qkv_bias
    assert build(MOE, {}).moe_shared_expert_intermediate_size is None


SIGMOID = Router("sigmoid", True, groups=4, chosen_groups=2, scale=2.5)
GLM = replace(MOE, family="glm4_moe", dense_layers=(0,), router=SIGMOID, shared_ffn_hidden_size=32)
LATENT = LatentAttention(
    query_rank=48, key_value_rank=32, plain_size=16, rotary_size=8, value_size=24
)
DEEPSEEK = replace(GLM, family="deepseek_v3", num_query_groups=4, latent=LATENT)
YARN = YarnRopeScaling(8.0, 2048, 24.0, 2.0, 0.7, 0.9)
"""No number is Megatron-Core's default."""


def test_a_router_of_sigmoids_has_a_bias_that_no_step_moves() -> None:
    t = build(GLM, {})
    assert (t.moe_router_score_function, t.moe_router_enable_expert_bias) == ("sigmoid", True)
    assert t.moe_router_bias_update_rate == 0
    assert (t.moe_router_num_groups, t.moe_router_group_topk) == (4, 2)
    assert t.moe_router_topk_scaling_factor == 2.5
    assert not t.moe_router_pre_softmax
    assert t.moe_layer_freq == [0, 1, 1, 1]
    ungrouped = build(replace(GLM, router=Router("sigmoid", True)), {})
    assert (ungrouped.moe_router_num_groups, ungrouped.moe_router_topk_scaling_factor) == (
        None,
        None,
    )


def test_a_router_s_scale_below_one_is_not_dropped() -> None:
    t = build(replace(GLM, router=replace(SIGMOID, scale=0.5)), {})
    assert t.moe_router_topk_scaling_factor == 0.5


def test_latent_attention_has_the_sizes_of_the_model() -> None:
    t = build(DEEPSEEK, {})
    assert type(t).__name__ == "MLATransformerConfig"
    assert (t.q_lora_rank, t.kv_lora_rank, t.qk_head_dim) == (48, 32, 16)
    assert (t.qk_pos_emb_head_dim, t.v_head_dim, t.rotary_base) == (8, 24, 1e6)
    assert t.qk_layernorm  # the norms of the latents
    plain = build(replace(DEEPSEEK, latent=replace(LATENT, query_rank=None)), {})
    assert plain.q_lora_rank is None


def test_plain_rope_of_latent_attention_is_not_scaled_and_not_fused(monkeypatch) -> None:
    """Megatron-Core rejects the fusion here, and its defaults would scale attention as for a YaRN factor of 40."""
    fused = replace(
        platform.current(), transformer_options={"apply_rope_fusion": True, "use_cpu_initialization": True}
    )  # fmt: skip
    monkeypatch.setattr(platform, "current", lambda: fused)
    t = build(DEEPSEEK, {})
    assert (t.rope_type, t.apply_rope_fusion) == ("rope", False)
    assert (t.rotary_scaling_factor, t.mscale, t.mscale_all_dim) == (1, 1, 1)


def test_yarn_of_latent_attention_has_the_numbers_of_the_model() -> None:
    t = build(replace(DEEPSEEK, rope_scaling=YARN), {})
    assert (t.rope_type, t.rotary_scaling_factor) == ("yarn", 8)
    assert (t.original_max_position_embeddings, t.beta_fast, t.beta_slow) == (2048, 24, 2)
    assert (t.mscale, t.mscale_all_dim) == (0.7, 0.9)


def test_norms_of_all_heads_are_no_qk_norm_of_megatron() -> None:
    """With ``qk_layernorm``, Megatron-Core sums the norms' gradients over ranks, which have different weights here."""
    assert not build(replace(MOE, family="olmoe", norms_all_heads=True), {}).qk_layernorm


def test_pipelines() -> None:
    plain = build(MOE, {"world_size": 2, "pipeline": 2})
    assert plain.variable_seq_lengths
    assert plain.deallocate_pipeline_outputs
    interleaved = build(MOE, {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2})
    assert not interleaved.variable_seq_lengths
    assert interleaved.virtual_pipeline_model_parallel_size == 2


def test_precision_and_recompute() -> None:
    t = build(MOE, {}, dtype="bfloat16", recompute="full")
    assert (t.params_dtype, t.pipeline_dtype, t.bf16) == (torch.bfloat16, torch.bfloat16, True)
    assert (t.recompute_granularity, t.recompute_method, t.recompute_num_layers) == (
        "full", "uniform", 1,
    )  # fmt: skip
    assert build(MOE, {}, recompute="selective").recompute_modules == ["core_attn"]


def test_megatron_table_comes_last_and_is_checked() -> None:
    assert build(MOE, {}, megatron={"init_method_std": 0.25}).init_method_std == 0.25
    backend = build(MOE, {}, megatron={"attention_backend": "flash"}).attention_backend
    assert isinstance(backend, Enum)
    assert backend.name == "flash"
    with pytest.raises(ValueError, match=r"megatron\.init_method_sdt"):
        build(MOE, {}, megatron={"init_method_sdt": 0.25})
    with pytest.raises(ValueError, match=r"parallel\.tensor"):
        build(MOE, {}, megatron={"tensor_model_parallel_size": 2})
    with pytest.raises(ValueError, match="ranks"):
        build(MOE, {}, megatron={"moe_token_dispatcher_type": "allgather"})
