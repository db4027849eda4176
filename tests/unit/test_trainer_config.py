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
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.megatron_config import transformer_config

MOE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2,
    head_dim=16, ffn_hidden_size=128, vocab_size=515, tied_embeddings=False, norm_eps=1e-6,
    rope_theta=1e6, rope_scaling=None, max_position_embeddings=2048, dtype="float32",
    num_experts=8, experts_per_token=2, moe_ffn_hidden_size=32, norm_topk_prob=True,
)  # fmt: skip
DENSE = replace(MOE, family="qwen2", num_experts=0)


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


def built(shape: ModelShape, parallel: dict[str, Any], **sections: Any):
    c = config(parallel, **sections)
    return transformer_config(c, shape, Layout.of(c.parallel.sizes))


def test_mixture_of_experts_routes_as_transformers_does() -> None:
    t = built(MOE, {})
    assert (t.num_moe_experts, t.moe_router_topk, t.moe_ffn_hidden_size) == (8, 2, 32)
    assert (t.moe_router_load_balancing_type, t.moe_aux_loss_coeff) == ("none", 0.0)
    assert (t.moe_router_dtype, t.moe_router_score_function) == ("fp32", "softmax")
    assert not t.moe_router_pre_softmax
    assert built(replace(MOE, norm_topk_prob=False), {}).moe_router_pre_softmax
    assert t.qk_layernorm
    assert not t.add_qkv_bias
    assert t.calculate_per_token_loss


@pytest.mark.parametrize(
    ("has_engine", "kernel", "library"),
    [
        (True, False, "Transformer Engine"),
        (True, True, "Transformer Engine"),
        (False, True, "apex"),
        (False, False, None),
    ],
)
def test_weight_gradients_are_accumulated_in_fp32_where_a_library_does(
    monkeypatch, has_engine, kernel, library
):
    """On GPUs; with adapters never, for the frozen weights have no gradients."""
    from megatron.core.tensor_parallel import layers

    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setitem(sys.modules, name, ModuleType(name) if kernel else None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(platform, "has_transformer_engine", lambda: has_engine)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    on_gpus = platform._cuda()
    assert platform.fused_weight_gradients() == library
    # Megatron-Core's output layer asks for apex, whose kernel the trainer never calls.
    assert layers._grad_accum_fusion_available is has_engine
    key = "gradient_accumulation_fusion"
    options = {key: on_gpus.transformer_options[key]}  # the others need Transformer Engine
    found = replace(on_gpus, transformer_options=options)
    monkeypatch.setattr(platform, "current", lambda: found)
    assert built(MOE, {}).gradient_accumulation_fusion is (library is not None)
    assert not built(MOE, {}, lora=s.LoraConfig(rank=2)).gradient_accumulation_fusion
    assert not built(MOE, {}, megatron={key: False}).gradient_accumulation_fusion


def test_on_cpus_weight_gradients_are_added_without_it(monkeypatch):
    name = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not built(MOE, {}).gradient_accumulation_fusion


def test_qwen2_has_biases_and_no_qk_norm() -> None:
    t = built(DENSE, {})
    assert t.add_qkv_bias
    assert not t.qk_layernorm
    assert t.num_moe_experts is None


def test_a_shared_expert_has_its_width_and_its_gate() -> None:
    shared = {"shared_ffn_hidden_size": 96, "gates_shared_expert": True}
    t = built(replace(MOE, family="qwen2_moe", **shared), {})
    assert (t.moe_shared_expert_intermediate_size, t.moe_shared_expert_gate) == (96, True)
    assert t.add_qkv_bias
    assert built(MOE, {}).moe_shared_expert_intermediate_size is None


def test_norms_of_all_heads_are_no_qk_norm_of_megatron() -> None:
    """With its flag on, Megatron-Core sums the gradients of different ranks' weights."""
    assert not built(replace(MOE, family="olmoe", norms_all_heads=True), {}).qk_layernorm


def test_pipelines() -> None:
    plain = built(MOE, {"world_size": 2, "pipeline": 2})
    assert plain.variable_seq_lengths
    assert plain.deallocate_pipeline_outputs
    interleaved = built(MOE, {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2})
    assert not interleaved.variable_seq_lengths
    assert interleaved.virtual_pipeline_model_parallel_size == 2


def test_precision_and_recompute() -> None:
    t = built(MOE, {}, dtype="bfloat16", recompute="full")
    assert (t.params_dtype, t.pipeline_dtype, t.bf16) == (torch.bfloat16, torch.bfloat16, True)
    assert (t.recompute_granularity, t.recompute_method, t.recompute_num_layers) == (
        "full", "uniform", 1,
    )  # fmt: skip
    assert built(MOE, {}, recompute="selective").recompute_modules == ["core_attn"]


def test_megatron_table_comes_last_and_is_checked() -> None:
    assert built(MOE, {}, megatron={"init_method_std": 0.25}).init_method_std == 0.25
    backend = built(MOE, {}, megatron={"attention_backend": "flash"}).attention_backend
    assert isinstance(backend, Enum)
    assert backend.name == "flash"
    with pytest.raises(ValueError, match=r"megatron\.init_method_sdt"):
        built(MOE, {}, megatron={"init_method_sdt": 0.25})
    with pytest.raises(ValueError, match=r"parallel\.tensor"):
        built(MOE, {}, megatron={"tensor_model_parallel_size": 2})
    with pytest.raises(ValueError, match="ranks"):
        built(MOE, {}, megatron={"moe_token_dispatcher_type": "allgather"})
