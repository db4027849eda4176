"""GLM-4.5, DeepSeek-V3, GLM-4.7-Flash, MiniMax-M2 and Hy3: how their configurations are read, and what they cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import UnsupportedModelError
from megatron_dppo.model.families import (
    FAMILIES,
    load_model_shape,
    missing_engine_keys,
    unknown_key_warnings,
)
from megatron_dppo.model.mapping import EngineParameter, engine_parameters, hf_tensors
from megatron_dppo.model.shape import active_parameters, forward_flops
from tests.unit.published_configs import CONFIGS, published, refused_keys, written

EXAMPLES = {
    "glm4_moe": "glm-4.5-air",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe_lite": "glm-4.7-flash",
}
MOONLIGHT = "moonlight-16b-a3b-instruct"
MINIMAX = "minimax-m2"
HY = "hy3"


@pytest.mark.parametrize("name", [*EXAMPLES.values(), MOONLIGHT])
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    ours, theirs = load_model_shape(CONFIGS / name), AutoConfig.from_pretrained(CONFIGS / name)
    assert (ours.num_experts, ours.experts_per_token) == (
        theirs.n_routed_experts,
        theirs.num_experts_per_tok,
    )
    assert (ours.router.scale, ours.norm_eps) == (theirs.routed_scaling_factor, theirs.rms_norm_eps)
    assert ours.shared_ffn_hidden_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    dense_layers = getattr(theirs, "first_k_dense_replace", 1)
    assert ours.moe_layers == tuple(range(dense_layers, ours.num_layers))
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rotary_fraction == theirs.rope_parameters.get("partial_rotary_factor", 1)
    if ours.latent is not None:
        assert ours.latent.query_rank == theirs.q_lora_rank
        assert (ours.latent.key_value_rank, ours.latent.value_size) == (
            theirs.kv_lora_rank,
            theirs.v_head_dim,
        )
        assert ours.head_dim == theirs.qk_nope_head_dim + theirs.qk_rope_head_dim


def test_minimax_is_read_as_transformers_reads_it() -> None:
    ours, theirs = (
        load_model_shape(CONFIGS / MINIMAX),
        AutoConfig.from_pretrained(CONFIGS / MINIMAX),
    )
    assert (ours.num_experts, ours.experts_per_token) == (256, 8)
    assert (ours.moe_ffn_hidden_size, ours.head_dim) == (theirs.intermediate_size, theirs.head_dim)
    assert (ours.rope_theta, ours.norm_eps) == (5e6, theirs.rms_norm_eps)
    assert ours.rotary_fraction == theirs.rope_parameters["partial_rotary_factor"] == 0.5
    assert ours.moe_layers == tuple(range(62))
    # A token uses 10 of 229 billion parameters.
    assert active_parameters(ours) == pytest.approx(10.4e9, rel=0.01)


def test_hy3_is_read_as_transformers_reads_it() -> None:
    ours, theirs = load_model_shape(CONFIGS / HY), AutoConfig.from_pretrained(CONFIGS / HY)
    assert (ours.num_experts, ours.experts_per_token) == (192, 8)
    assert ours.router.scale == theirs.router_scaling_factor
    assert ours.shared_ffn_hidden_size == theirs.num_shared_experts * theirs.moe_intermediate_size
    assert [i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "dense"] == [0]
    assert ours.dense_layers == (0,)
    assert (ours.rope_theta, ours.norm_eps) == (
        theirs.rope_parameters["rope_theta"],
        theirs.rms_norm_eps,
    )
    # The model card counts the embedding, too.
    assert active_parameters(ours) == pytest.approx(20.2e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX, {"use_routing_bias": False}, "use_routing_bias"),
        (MINIMAX, {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
        (MINIMAX, {"attn_type_list": [0] + 61 * [1]}, "attn_type_list"),
        (MINIMAX, {"rotary_dim": None, "partial_rotary_factor": math.nan}, "partial_rotary_factor"),
        (MINIMAX, {"rotary_dim": None, "partial_rotary_factor": math.inf}, "partial_rotary_factor"),
        (MINIMAX, {"rotary_dim": None, "partial_rotary_factor": 10**400}, "partial_rotary_factor"),
        (HY, {"qk_norm": False}, "qk_norm"),
        (HY, {"route_norm": False}, "route_norm"),
        (HY, {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid"),
        (HY, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias"),
        (HY, {"expert_hidden_dim": 768}, "expert_hidden_dim"),
        (HY, {"first_k_dense_replace": 3}, "first_k_dense_replace"),
        (HY, {"attention_bias": True}, "attention_bias"),
        (HY, {"mlp_bias": True}, "mlp_bias"),
        (HY, {"sliding_window": 4096, "layer_types": ["sliding_attention"] * 80}, "layer_types"),
        (HY, {"mlp_layer_types": 5}, "mlp_layer_types"),
        (HY, {"mlp_layer_types": {"dense": 1}}, "mlp_layer_types"),
    ],
)
def test_a_minimax_or_hy3_that_would_be_trained_otherwise_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], key: str
) -> None:
    assert set(refused_keys(tmp_path, published(name) | changes)) == {key}


@pytest.mark.parametrize("name", [*EXAMPLES.values(), MINIMAX, HY])
def test_a_config_that_transformers_saves_is_read_alike(tmp_path: Path, name: str) -> None:
    AutoConfig.from_pretrained(CONFIGS / name).save_pretrained(tmp_path)
    assert load_model_shape(tmp_path) == load_model_shape(CONFIGS / name)
    assert unknown_key_warnings(tmp_path) == []


@pytest.mark.parametrize(("family", "name"), EXAMPLES.items())
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        # Megatron-Core always renormalises the weights of sigmoids, except of a single expert.
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok"),
        # Megatron-Core computes the score of a group in another way than the model.
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 6}, "topk_group"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"first_k_dense_replace": 10**9}, "first_k_dense_replace"),
        ({"n_group": 3, "topk_group": 1, "num_experts_per_tok": 2}, "n_group"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(
    tmp_path: Path, family: str, name: str, changes: dict[str, Any], key: str
) -> None:
    assert key in refused_keys(tmp_path, published(name) | changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "original_max_position_embeddings"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                    "mscale": 0.7,
                }
            },
            "mscale_all_dim",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
    ],
)
def test_latent_attention_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    assert key in refused_keys(tmp_path, published("deepseek-v3") | changes)


def test_a_choice_of_all_groups_is_no_choice(tmp_path: Path) -> None:
    router = load_model_shape(
        written(tmp_path, published("deepseek-v3") | {"n_group": 4, "topk_group": 4})
    ).router
    assert (router.groups, router.chosen_groups) == (1, 1)


def test_the_latent_of_queries_is_absent_only_where_the_file_says_so(tmp_path: Path) -> None:
    values = published("deepseek-v3")
    del values["q_lora_rank"]
    ranks = []
    for changes in ({}, {"q_lora_rank": None}, {"q_lora_rank": 64}):
        latent = load_model_shape(written(tmp_path, values | changes)).latent
        assert latent is not None
        ranks.append(latent.query_rank)
    assert ranks == [1536, None, 64]


def test_layers_of_glm_lite_are_those_of_both_keys(tmp_path: Path) -> None:
    values = published("glm-4.7-flash") | {"num_hidden_layers": 4}
    listed = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    both = values | listed | {"first_k_dense_replace": 2}
    assert load_model_shape(written(tmp_path, both)).dense_layers == (0, 1)
    with pytest.raises(UnsupportedModelError, match="first_k_dense_replace"):
        load_model_shape(written(tmp_path, values | listed))
    del both["first_k_dense_replace"]
    assert missing_engine_keys(written(tmp_path, both)) == {"first_k_dense_replace": 2}


def test_keys_that_the_engine_reads_are_completed(tmp_path: Path) -> None:
    for name in (*EXAMPLES.values(), MOONLIGHT, MINIMAX, HY):
        missing_in_published = missing_engine_keys(CONFIGS / name)
        assert missing_in_published == {}
    AutoConfig.from_pretrained(CONFIGS / MOONLIGHT).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    values = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    expected = {key: value for key, value in values.items() if key not in found}
    assert missing_engine_keys(tmp_path) == expected


@pytest.mark.parametrize("name", [*EXAMPLES.values(), MOONLIGHT, MINIMAX, HY])
def test_active_parameters_are_those_of_the_tensors(name: str) -> None:
    """All matrices multiply a token, except the embedding and the matrices of experts that are not chosen."""
    shape = load_model_shape(CONFIGS / name)
    embedding = FAMILIES[shape.family].embedding.sources[0].name
    expected = 0
    for tensor, dims in hf_tensors(shape).items():
        if len(dims) == 2 and tensor != embedding:
            size = dims[0] * dims[1]
            if ".experts." in tensor:
                size = size * shape.experts_per_token // shape.num_experts
            expected += size
    assert active_parameters(shape) == pytest.approx(expected, rel=1e-9)


def test_the_cache_of_latent_attention_holds_latents() -> None:
    """In a layer of Moonlight, a token's latents have 7.1 times fewer elements than its heads' keys and values."""
    shape = load_model_shape(CONFIGS / MOONLIGHT)
    assert [shape.cached_elements(tensor) for tensor in (1, 8)] == [576, 576]
    heads = 2 * shape.num_query_groups * shape.latent.plain_size
    assert heads / shape.cached_elements() == pytest.approx(7.1, abs=0.02)
    air = load_model_shape(CONFIGS / "glm-4.5-air")
    assert [air.cached_elements(tensor) for tensor in (1, 8, 16)] == [2048, 256, 256]


def test_attention_costs_the_widths_of_queries_and_of_values() -> None:
    """Each of Moonlight's 27 layers has 16 heads, with 192 elements of a query and 128 of a value."""
    cost = forward_flops(load_model_shape(CONFIGS / MOONLIGHT))
    assert cost.quadratic == 27 * 16 * (192 + 128)


def engine_tensors(name: str) -> dict[str, EngineParameter]:
    """Return SGLang's tensors of layer 3 of a model, without experts, by their names in the layer."""
    shape = replace(load_model_shape(CONFIGS / name), num_layers=4, num_experts=8)
    prefix = "model.layers.3."
    tensors = engine_parameters(shape, EngineLayout(1), 0)
    return {
        p.name.removeprefix(prefix): p
        for p in tensors
        if p.name.startswith(prefix) and ".experts." not in p.name
    }


@pytest.mark.parametrize("name", [*EXAMPLES.values(), MOONLIGHT])
def test_the_engine_keeps_biases_of_routers_in_fp32(name: str) -> None:
    found = {k for k, tensor in engine_tensors(name).items() if tensor.dtype == "float32"}
    expected = {"mlp.gate.e_score_correction_bias"}
    if name.startswith("glm"):
        expected.add("mlp.gate.weight")
    assert found == expected


def test_the_engine_computes_both_latents_by_one_matrix() -> None:
    tensors = engine_tensors("deepseek-v3")
    fused = tensors["self_attn.fused_qkv_a_proj_with_mqa.weight"]
    assert fused.shape == (1536 + 512 + 64, 7168)
    queries, keys = fused.segments
    assert (queries.hf_name, queries.local_start, queries.length) == (
        "model.layers.3.self_attn.q_a_proj.weight",
        0,
        1536,
    )
    assert (keys.hf_name, keys.local_start, keys.length) == (
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        1536,
        576,
    )
    assert "self_attn.q_a_proj.weight" not in tensors
    assert "self_attn.kv_a_proj_with_mqa.weight" in engine_tensors(MOONLIGHT)
