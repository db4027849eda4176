"""Configurations of published models with the changes that derived models have: each is read with the right meaning,
or refused with the key in the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.model.errors import UnsupportedModelError
from megatron_dppo.model.families import (
    FAMILIES,
    load_model_shape,
    unknown_key_warnings,
    with_language_model_values,
)
from tests.unit.published_configs import published_family, refused_keys, written

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "vocab_size": 512, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
}  # fmt: skip
_EXPERT_KEYS = {
    "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers",
}  # fmt: skip
_DENSE = {key: value for key, value in QWEN3_MOE.items() if key not in _EXPERT_KEYS}
LLAMA = _DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = _DENSE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

REFUSED: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    (QWEN3_MOE, {"rope_scaling": YARN}, {"rope_scaling"}),
    (QWEN3_MOE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_scaling"}),
    (QWEN3_MOE, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_scaling"}),
    (QWEN3_MOE, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor"}),
    (QWEN3_MOE, {"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor"}),
    (QWEN3_MOE, {"quantization_config": FP8}, {"quantization_config"}),
    (
        QWEN3_MOE,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config"},
    ),
    (LLAMA, {"sliding_window": 4096}, {"sliding_window"}),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 4096}, {"use_sliding_window"}),
    (QWEN3_MOE, {"layer_types": ["full_attention", "sliding_attention"] * 2}, {"layer_types"}),
    (QWEN3_MOE, {"shared_expert_intermediate_size": 64}, {"shared_expert_intermediate_size"}),
    (QWEN3_MOE, {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers"}),
    (LLAMA, {"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping"}),
    (LLAMA, {"final_logit_softcapping": 30.0}, {"final_logit_softcapping"}),
    (
        LLAMA,
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
        {"embedding_multiplier", "residual_multiplier", "logits_scaling"},
    ),
    (LLAMA, {"use_qk_norm": True}, {"use_qk_norm"}),
    (QWEN3_MOE, {"clip_qkv": 8.0}, {"clip_qkv"}),
    (QWEN3_MOE, {"hidden_act": "gelu"}, {"hidden_act"}),
    (LLAMA, {"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_activation"}),
    (QWEN3_MOE, {"scoring_func": "sigmoid"}, {"scoring_func"}),
    (QWEN3_MOE, {"routed_scaling_factor": 2.5}, {"routed_scaling_factor"}),
    (QWEN3_MOE, {"n_group": 4, "topk_group": 2}, {"n_group", "topk_group"}),
    (
        LLAMA,
        {"attention_multiplier": 0.01, "query_pre_attn_scalar": 256},
        {"attention_multiplier", "query_pre_attn_scalar"},
    ),
    (LLAMA, {"rope_interleave": True}, {"rope_interleave"}),
    (LLAMA, {"no_rope_layers": [1, 1, 1, 0]}, {"no_rope_layers"}),
    (QWEN3_MOE, {"torch_dtype": "auto"}, {"dtype"}),
    (QWEN3_MOE, {"text_config": QWEN3_MOE}, {"text_config"}),
    (LLAMA, {"mlp_bias": True}, {"mlp_bias"}),
]
"""A configuration, its changes, and the keys that the error must name."""

BOTH_ROPES = {
    "rope_scaling": {"rope_type": "default"},
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
}
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (QWEN3_MOE, {}, {"head_dim": 16, "rope_theta": 1e6, "norm_topk_prob": True}),
    # transformers and SGLang read rope_scaling alone where a file has both.
    (QWEN3_MOE, BOTH_ROPES, {"rope_theta": 1e6}),
    (QWEN3_MOE, {"router_jitter_noise": 0.1}, {"norm_topk_prob": True}),
    (QWEN3_MOE, {"head_dim": None, "num_attention_heads": 8}, {"head_dim": 8}),
    (LLAMA, {"head_dim": None, "num_attention_heads": 8}, {"head_dim": 8}),
    (QWEN2, {"attention_bias": True}, {"family": "qwen2"}),
    (LLAMA, {"pretraining_tp": 2}, {"family": "llama"}),
    (QWEN3_MOE, {"norm_topk_prob": None}, {"norm_topk_prob": False}),
    (QWEN3_MOE, {"rms_norm_eps": None}, {"norm_eps": 1e-6}),
    (QWEN3_MOE, {"attention_dropout": 0.1}, {"family": "qwen3_moe"}),
    (QWEN3_MOE, {"tie_word_embeddings": True}, {"tied_embeddings": True}),
]
"""A configuration, its changes, and fields of the resulting shape."""


@pytest.mark.parametrize(
    ("base", "changes", "keys"), REFUSED, ids=[",".join(row[1]) for row in REFUSED]
)
def test_an_altered_config_is_refused_by_its_keys(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], keys: set[str]
) -> None:
    load_model_shape(written(tmp_path, base))
    assert set(refused_keys(tmp_path, base | changes)) == keys


@pytest.mark.parametrize(
    ("base", "changes", "fields"), ACCEPTED, ids=[",".join(row[1]) or "plain" for row in ACCEPTED]
)
def test_an_altered_config_is_read_as_it_is_meant(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    folder = written(tmp_path, base | changes)
    shape = load_model_shape(folder)
    assert {name: getattr(shape, name) for name in fields} == fields
    assert unknown_key_warnings(folder) == []


def test_an_unknown_key_of_a_rope_table_is_a_warning_with_its_value(tmp_path: Path) -> None:
    table = {"rope_type": "default", "rope_theta": 1e6, "wobble": 0.25}
    (warning,) = unknown_key_warnings(written(tmp_path, QWEN3_MOE | {"rope_parameters": table}))
    assert "rope_parameters.wobble" in warning
    assert "0.25" in warning


@pytest.mark.parametrize("family", FAMILIES)
def test_a_renormalised_router_with_one_expert_a_token_is_refused(
    tmp_path: Path, family: str
) -> None:
    values = published_family(family)
    shape = load_model_shape(written(tmp_path, values))
    one_expert = {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    if "experts_per_token" in values:
        one_expert["experts_per_token"] = 1
    folder = written(tmp_path, with_language_model_values(values, one_expert))
    if not shape.is_moe or not shape.norm_topk_prob:
        # Megatron-Core and the model give the expert the weight that its softmax has over all experts.
        assert load_model_shape(folder).experts_per_token == shape.is_moe
        return
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_shape(folder)
    (line,) = caught.value.faults
    assert "num_experts_per_tok is 1, expected at least 2" in line
