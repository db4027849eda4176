"""Shapes of small models that no file has. Tests with other sizes replace some."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.model.shape import ModelShape

MOE = ModelShape(
    family="qwen3_moe", num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2,
    head_dim=16, ffn_hidden_size=128, vocab_size=515, tied_embeddings=False, norm_eps=1e-6,
    rope_theta=1e6, rope_scaling=None, max_position_embeddings=2048, dtype="float32",
    num_experts=8, experts_per_token=2, moe_ffn_hidden_size=32,
)  # fmt: skip
DENSE = replace(MOE, family="qwen2", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0)
