"""The map between Hugging Face and Megatron parameters equals values worked out by hand and Megatron's rank order."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_dppo.checkpoint_conversion.gathering import assemble, pack
from megatron_dppo.config.checks import engine_split_faults
from megatron_dppo.model.config_keys import NEUTRAL
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError, ModelConfigError, UnsupportedModelError
from megatron_dppo.model.families import FAMILIES, load_model_shape, unknown_key_warnings
from megatron_dppo.model.gather_plan import (
    elements_between_nodes,
    elements_held,
    gather_plan,
    hf_buckets_plan,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import engine_parameters, hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import engine_vocabulary
from tests import small_shapes
from tests.messages import mentioning
from tests.unit.published_configs import refused_keys, written

_SIZES: dict[str, Any] = {"hidden_size": 4, "head_dim": 1, "ffn_hidden_size": 4, "vocab_size": 5}
DENSE = replace(small_shapes.DENSE, **_SIZES)
MOE = replace(small_shapes.MOE, **_SIZES, num_experts=4, moe_ffn_hidden_size=2)


def fill(
    shape: ModelShape, layout: Layout, rank: int, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the local parameters of ``rank``, filled segment by segment: ``chunk:name`` -> tensor."""
    parameters = {}
    for p in local_parameters(shape, layout, rank):
        local = torch.zeros(p.shape)
        for s in p.segments:
            s.of_local(local).copy_(s.of_hf(tensors[s.hf_name]))
        parameters[f"{p.chunk}:{p.name}"] = local
    return parameters


def numbered_tensors(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return tensors of ``shape`` whose elements are 1, 2, 3 and so on, so that no two elements are equal."""
    tensors, start = {}, 1.0
    for name, dims in hf_tensors(shape).items():
        tensors[name] = torch.arange(start, start + math.prod(dims)).reshape(dims)
        start += math.prod(dims)
    return tensors


def test_queries_keys_and_values_are_interleaved_by_group():
    """4 heads in 2 groups of head size 1: rows q0 q1 k0 v0 | q2 q3 k1 v1; TP2 gives each rank one group."""
    name = "model.layers.0.self_attn.{}_proj.bias"
    tensors = numbered_tensors(DENSE)
    tensors[name.format("q")] = torch.tensor([10.0, 11.0, 12.0, 13.0])
    tensors[name.format("k")] = torch.tensor([20.0, 21.0])
    tensors[name.format("v")] = torch.tensor([30.0, 31.0])
    key = "0:decoder.layers.0.self_attention.linear_qkv.bias"
    assert fill(DENSE, Layout(), 0, tensors)[key].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert fill(DENSE, Layout(tensor=2), 0, tensors)[key].tolist() == [10, 11, 20, 30]
    assert fill(DENSE, Layout(tensor=2), 1, tensors)[key].tolist() == [12, 13, 21, 31]
    shards = [fill(DENSE, Layout(tensor=4), r, tensors)[key].tolist() for r in range(4)]
    assert shards == [[10, 11], [20, 30], [12, 13], [21, 31]]


def test_gates_and_ups_are_stacked_on_each_rank_and_the_down_projection_is_cut_by_columns():
    tensors = numbered_tensors(DENSE)
    gate, up, down = (
        tensors[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
    )
    for rank in range(2):
        local = fill(DENSE, Layout(tensor=2), rank, tensors)
        rows = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(
            local["0:decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[rows], up[rows]])
        )
        assert torch.equal(local["0:decoder.layers.0.mlp.linear_fc2.weight"], down[:, rows])


def test_the_vocabulary_is_padded_with_zero_rows():
    """Each of 4 ranks has 2 rows of 5 real ones: the third rank has one real row, the fourth none."""
    tensors = numbered_tensors(DENSE)
    rows = [
        fill(DENSE, Layout(tensor=4), r, tensors)["0:embedding.word_embeddings.weight"]
        for r in range(4)
    ]
    embedding = torch.cat(rows)
    assert torch.equal(embedding[:5], tensors["model.embed_tokens.weight"])
    assert torch.equal(embedding[5:], torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("ids", "ranks", "rows", "real"),
    [
        (5, 1, 64, [5]),
        (129, 2, 96, [96, 33]),  # 192 rows, which two ranks divide
        (129, 3, 64, [64, 64, 1]),
        (129, 6, 32, [32, 32, 32, 32, 1, 0]),
        (66, 3, 64, [64, 2, 0]),  # 128 rows are no multiple of 3, so 192
        (200, 3, 128, [128, 72, 0]),  # 256 rows are no multiple of 3 either, so 384
    ],
)
def test_the_engine_s_vocabulary_is_padded_to_64_or_to_64_a_rank(ids, ranks, rows, real):
    shards = [engine_vocabulary([(ids, 4)], DENSE, rank, ranks) for rank in range(ranks)]
    assert [shard.shape for shard in shards] == [(rows, 4)] * ranks
    assert [sum(block.length for block in shard.blocks) for shard in shards] == real
    assert [b.source_start for shard in shards for b in shard.blocks] == [
        rank * rows for rank, length in enumerate(real) if length
    ]


def test_layers_of_an_interleaved_pipeline_are_chunk_major():
    """4 layers, PP2 x VPP2: stage 0 holds layers 0 and 2, stage 1 layers 1 and 3; each is layer 0 of its chunk."""
    layout = Layout(pipeline=2, virtual_pipeline=2)
    for rank, layers in ((0, [0, 2]), (1, [1, 3])):
        weights = [
            (p.chunk, p.segments[0].hf_name)
            for p in local_parameters(DENSE, layout, rank)
            if p.name == "decoder.layers.0.mlp.linear_fc2.weight"
        ]
        assert weights == [
            (c, f"model.layers.{layer}.mlp.down_proj.weight") for c, layer in enumerate(layers)
        ]
    names = [{p.chunk: p.name for p in local_parameters(DENSE, layout, r)} for r in (0, 1)]
    assert names[1][1] == "output_layer.weight"
    first_chunk_names = [p.name for p in local_parameters(DENSE, layout, 0) if p.chunk == 0]
    assert first_chunk_names[0] == "embedding.word_embeddings.weight"


def test_experts_are_numbered_locally_and_cut_by_their_own_tensor_parallel_size():
    """At TP1, EP2, ETP2 and DP4, rank 3 has etp 1 and ep 1: the second half of experts 2 and 3."""
    layout = Layout(expert=2, expert_tensor=2, data=4)
    tensors = numbered_tensors(MOE)
    local = fill(MOE, layout, 3, tensors)
    gate = tensors["model.layers.1.mlp.experts.2.gate_proj.weight"]
    up = tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    weight = local["0:decoder.layers.1.mlp.experts.linear_fc1.weight0"]
    assert torch.equal(weight, torch.stack([gate[1], up[1]]))
    down = tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(local["0:decoder.layers.1.mlp.experts.linear_fc2.weight1"], down[:, 1:])
    assert "0:decoder.layers.1.mlp.experts.linear_fc1.weight2" not in local
    assert local["0:decoder.layers.1.mlp.router.weight"].shape == (4, 4)


def test_one_rank_of_each_replica_set_is_primary():
    layout = Layout(tensor=2, data=2, expert=2)
    holders: dict[tuple, list[int]] = {}
    for rank in range(4):
        for p in local_parameters(MOE, layout, rank):
            if p.is_primary:
                starts = tuple(s.hf_start for s in p.segments)
                holders.setdefault((p.name, starts, p.segments[0].hf_name), []).append(rank)
    assert all(len(ranks) == 1 for ranks in holders.values())
    assert holders[("decoder.final_layernorm.weight", (0,), "model.norm.weight")] == [0]
    proj = "model.layers.0.self_attn.o_proj.weight"
    assert holders[("decoder.layers.0.self_attention.linear_proj.weight", (2,), proj)] == [1]
    fc2 = "decoder.layers.0.mlp.experts.linear_fc2.weight0"
    assert holders[(fc2, (0,), "model.layers.0.mlp.experts.2.down_proj.weight")] == [1]


def test_tied_embeddings_have_a_copy_on_the_last_stage_that_is_never_primary():
    tied_model = replace(DENSE, tied_embeddings=True)
    assert "lm_head.weight" not in hf_tensors(tied_model)
    assert not [
        p for p in local_parameters(tied_model, Layout(), 0) if p.name == "output_layer.weight"
    ]
    (copy,) = (
        p
        for p in local_parameters(tied_model, Layout(pipeline=2), 1)
        if p.name == "output_layer.weight"
    )
    assert [s.hf_name for s in copy.segments] == ["model.embed_tokens.weight"]
    assert not copy.is_primary


def test_the_names_are_those_of_the_transformer_engine_spec():
    names = {
        p.name for p in local_parameters(replace(MOE, num_layers=1, num_experts=1), Layout(), 0)
    }
    layer = "decoder.layers.0."
    assert names == {
        "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
        layer + "self_attention.linear_qkv.weight", layer + "self_attention.linear_qkv.layer_norm_weight",
        layer + "self_attention.q_layernorm.weight", layer + "self_attention.k_layernorm.weight",
        layer + "self_attention.linear_proj.weight", layer + "pre_mlp_layernorm.weight",
        layer + "mlp.router.weight", layer + "mlp.experts.linear_fc1.weight0", layer + "mlp.experts.linear_fc2.weight0",
    }  # fmt: skip
    dense_names = {p.name for p in local_parameters(replace(DENSE, num_layers=1), Layout(), 0)}
    assert {
        layer + "mlp.linear_fc1.layer_norm_weight",
        layer + "self_attention.linear_qkv.bias",
    } <= dense_names


@pytest.mark.parametrize(
    "sizes", [(2, 2, 1, 2, 1, 2), (4, 2, 1, 4, 2, 2), (1, 2, 1, 4, 1, 4), (2, 1, 2, 4, 1, 2)]
)
def test_rank_coordinates_are_megatrons(sizes):
    import megatron_dppo.trainer  # noqa: F401  (prepares the platform before megatron is imported)

    from megatron.core.parallel_state import RankGenerator  # isort: skip

    tp, pp, cp, ep, etp, dp = sizes
    layout = Layout(tensor=tp, pipeline=pp, context=cp, expert=ep, expert_tensor=etp, data=dp)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=etp, ep=ep, dp=layout.expert_data, pp=pp, cp=1, order=order)
    coordinates = [layout.coordinates(r) for r in range(layout.world_size)]
    for generator, token, field in (
        (dense, "tp", "tp"), (dense, "dp", "dp"), (dense, "pp", "pp"), (dense, "cp", "cp"),
        (experts, "tp", "etp"), (experts, "ep", "ep"), (experts, "dp", "edp"),
    ):  # fmt: skip
        for group in generator.get_ranks(token):
            assert [getattr(coordinates[r], field) for r in group] == list(range(len(group)))


def test_buckets_hold_whole_tensors_in_model_order_and_rebuild_them():
    layout = Layout(tensor=2, pipeline=2, data=2, expert=4)
    tensors = numbered_tensors(MOE)
    local = [
        {(int(k[0]), k[2:]): v for k, v in fill(MOE, layout, r, tensors).items()}
        for r in range(layout.world_size)
    ]
    plan = hf_buckets_plan(MOE, layout, bucket_bytes=200, item_bytes=4)
    assert [t.name for b in plan for t in b.tensors] == list(tensors)
    for bucket in plan:
        size = 4 * sum(t.elements for t in bucket.tensors)
        assert size <= 200 or len(bucket.tensors) == 1
        packed = {r: pack(bucket, r, local[r]) for r in range(layout.world_size)}
        sent_elements = {r: len(f) for r, f in packed.items() if len(f)}
        assert sent_elements == bucket.elements_by_rank
        assert 4 * sum(sent_elements.values()) == size
        out = torch.empty(bucket.elements)
        for name, tensor in assemble(bucket, out, {r: packed[r] for r in sent_elements}, None, {}):
            assert torch.equal(tensor, tensors[name])


def test_elements_between_nodes_are_those_of_other_nodes_than_the_receiver_s():
    # Stage 0: ranks 0-3, stage 1: ranks 4-7, each with all experts.
    layout = Layout(tensor=2, pipeline=2, data=2, expert=4)
    buckets = hf_buckets_plan(MOE, layout, 10**6, 4)
    held = Counter[int]()
    for tensor in gather_plan(MOE, layout):
        held += elements_held(tensor)
    for ranks_per_node in (1, 2, 4, 8):
        crossing = sum(elements_between_nodes(bucket, ranks_per_node) for bucket in buckets)
        assert crossing == sum(n for rank, n in held.items() if rank >= ranks_per_node)


def test_every_tensor_comes_once_from_the_gather_plan():
    plan = gather_plan(MOE, Layout(tensor=2))
    assert [t.name for t in plan] == list(hf_tensors(MOE))
    assert all(sum(p.elements for p in t.pieces) == t.elements for t in plan)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=3), "tensor: got 3, .* 4 attention heads"),
        (Layout(pipeline=3), "pipeline: got 3, .* 4 layers"),
        (Layout(pipeline=2, virtual_pipeline=4), "pipeline: got 2 x virtual_pipeline = 2 x 4, exp"),
        (Layout(expert=8, data=8), "expert: got 8, .* 4 experts"),
        (Layout(tensor=4, expert_tensor=4), "expert_tensor: got 4, .* MLP size 2"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(layout, message):
    with pytest.raises(LayoutError, match=message):
        local_parameters(MOE, layout, 0)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 0}, {"virtual_pipeline": 2}, {"expert": 2}, {"expert_tensor": 3}]
)
def test_impossible_layouts_are_refused(sizes):
    with pytest.raises(LayoutError, match=r"layout\."):
        Layout(**sizes)


def config(**changes) -> dict:
    base = {
        "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 32,
        "rope_theta": 1e6, "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    return {**base, **changes}


OLMOE: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip


def config_of(family: str) -> dict:
    """Return the values of a whole config.json of ``family``."""
    moe: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shared_expert = {"shared_expert_intermediate_size": 64}
    extra = {"qwen3_moe": moe, "qwen2_moe": moe | shared_expert, "olmoe": OLMOE}
    return config(model_type=family, **extra.get(family, {}))


def test_config_in_both_transformers_spellings(tmp_path):
    shape = load_model_shape(written(tmp_path, config()))
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    new_values = config(dtype="bfloat16", rope_parameters=rope)
    del new_values["torch_dtype"], new_values["rope_theta"]
    assert load_model_shape(written(tmp_path, new_values)) == shape
    assert (shape.head_dim, shape.rope_theta, shape.dtype, shape.tied_embeddings) == (
        128,
        1e6,
        "bfloat16",
        False,
    )


def test_llama3_rotary_scaling_is_read(tmp_path):
    rope = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaling = load_model_shape(
        written(tmp_path, config(model_type="llama", rope_scaling=rope))
    ).rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_positions) == (32.0, 8192)


ABSENT = object()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e6}


QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "moe_intermediate_size": 32},
    **{"num_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; supported families"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "architectures is"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'"),
        ({"model_type": "qwen3_moe"}, "num_experts or num_local_experts is missing, expected a"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        # If a file has both keys, transformers and SGLang read only ``rope_scaling``.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": PLAIN_ROPE},
            "rope_scaling: rope type 'yarn'",
        ),
        ({"rope_parameters": {"full_attention": PLAIN_ROPE}}, "rope_parameters.full_attention"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta is nan"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 7}, "layer_types"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "(?s)quantization_config.*'fp8'.*convert",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*'gptq'"),
        ({"quantization_config": "int4"}, "quantization_config.*'int4'"),
        ({"quantization_config": "fp8"}, "quantization_config.*'fp8'.*a table"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"scale_emb": 12}, "scale_emb"),
        ({"sliding_window": 4096, "model_type": "llama"}, "sliding_window"),
        ({"num_experts": 8}, "num_experts"),
        (QWEN3_MOE | {"num_experts": 10**9}, "num_experts is 1000000000"),
        (QWEN3_MOE | {"num_experts_per_tok": 9}, "is 9, .* 8"),
    ],
)
def test_unsupported_configs_are_refused_with_the_reason(tmp_path, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        load_model_shape(written(tmp_path, config(**changes)))


ARITHMETIC_KEYS = {
    "attention_multiplier": 0.01, "attn_logit_softcapping": 50.0, "clip_qkv": 8.0, "embedding_multiplier": 12.0,
    "final_logit_softcapping": 30.0, "first_k_dense_replace": 1, "hidden_activation": "gelu_pytorch_tanh",
    "logits_scaling": 6.0, "mlp_bias": True, "n_group": 4, "n_shared_experts": 1, "no_rope_layers": [1, 1, 1, 0],
    "num_nextn_predict_layers": 1, "per_layer_config": {"0": {"num_attention_heads": 2}},
    "query_pre_attn_scalar": 256, "residual_multiplier": 0.22, "rope_interleave": True, "rotary_pct": 0.5,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "shared_expert_intermediate_size": 64,
    "text_config": {"hidden_size": 64}, "topk_group": 2, "use_qk_norm": True,
}  # fmt: skip
"""Keys, with values, that change the arithmetic of models of other families."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("key", ARITHMETIC_KEYS)
def test_a_key_that_changes_the_arithmetic_is_refused_in_every_family(tmp_path, family, key):
    values = config_of(family)
    load_model_shape(written(tmp_path, {**values, key: None}))
    assert refused_keys(tmp_path, {**values, key: ARITHMETIC_KEYS[key]}) == [key]


@pytest.mark.parametrize("key", NEUTRAL)
def test_neutral_values_are_taken(tmp_path, key):
    for value in NEUTRAL[key]:
        folder = written(tmp_path, {**config_of("qwen2"), key: value})
        load_model_shape(folder)
        assert unknown_key_warnings(folder) == []


def test_an_unknown_key_is_a_warning(tmp_path):
    folder = written(tmp_path, {**config_of("qwen3_moe"), "wobble": 0.5, "use_cache": True})
    load_model_shape(folder)
    (warning,) = unknown_key_warnings(folder)
    assert "wobble" in warning
    assert str(tmp_path) in warning


PUBLISHED = sorted((Path(__file__).resolve().parents[2] / "examples" / "model_configs").glob("*/"))


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_no_published_config_has_an_unknown_key(folder):
    if json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES:
        assert unknown_key_warnings(folder) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_config_that_transformers_writes_has_an_unknown_key(tmp_path, family):
    AutoConfig.for_model(family, architectures=[FAMILIES[family].architecture]).save_pretrained(
        tmp_path
    )
    assert unknown_key_warnings(tmp_path) == []


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 5e5}},
        {
            "rope_scaling": {"rope_type": "default", "rope_theta": 2e5},
            "rope_parameters": PLAIN_ROPE,
        },
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": ABSENT},
        {"rope_parameters": {"partial_rotary_factor": 1.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 512}},
        {"num_key_value_heads": ABSENT},
        {"head_dim": ABSENT},
        {"rms_norm_eps": ABSENT},
        {"tie_word_embeddings": ABSENT},
        {"norm_topk_prob": ABSENT},
    ],
)
def test_a_config_is_read_as_transformers_reads_it(tmp_path, family, changes):
    sizes = {"num_attention_heads": 32, "num_key_value_heads": 2}
    if family in ("qwen3_moe", "qwen2_moe"):
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    values = config(model_type=family, **{**sizes, **changes})
    folder = written(tmp_path, {k: v for k, v in values.items() if v is not ABSENT})
    shape, reference = load_model_shape(folder), AutoConfig.from_pretrained(folder)
    heads = reference.num_attention_heads
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // heads
    rope, scaling = reference.rope_parameters, shape.rope_scaling
    assert (shape.num_query_groups, shape.head_dim) == (reference.num_key_value_heads, head_dim)
    assert (shape.norm_eps, shape.tied_embeddings) == (
        reference.rms_norm_eps,
        reference.tie_word_embeddings,
    )
    assert shape.rope_theta == rope["rope_theta"]
    assert ("default" if scaling is None else "llama3") == rope["rope_type"]
    if scaling is not None:
        assert scaling.original_max_positions == rope["original_max_position_embeddings"]
    if shape.is_moe:
        assert shape.norm_topk_prob == reference.norm_topk_prob


def test_a_missing_or_broken_config_is_refused(tmp_path):
    with pytest.raises(ModelConfigError, match=mentioning(tmp_path)):
        load_model_shape(tmp_path)
    # Python reads no number of more than 4300 digits.
    for text in ("{", '{"model_type": "qwen3", "hidden_size": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelConfigError, match="JSON"):
            load_model_shape(tmp_path)


def test_all_that_is_wrong_with_a_config_is_one_error(tmp_path):
    values = config(model_type="qwen3_moe", hidden_size=0, num_experts=8, num_experts_per_tok=2.5)
    keys = refused_keys(tmp_path, values)
    assert sorted(keys) == ["hidden_size", "moe_intermediate_size", "num_experts_per_tok"]


def test_olmoe_is_read_as_transformers_reads_it(tmp_path):
    folder = written(tmp_path, config_of("olmoe"))
    shape, reference = load_model_shape(folder), AutoConfig.from_pretrained(folder)
    assert (shape.moe_ffn_hidden_size, shape.norm_topk_prob) == (
        reference.intermediate_size,
        reference.norm_topk_prob,
    )
    assert shape.norms_all_heads is True
    assert (shape.num_query_groups, shape.head_dim, shape.norm_eps) == (
        4,
        16,
        reference.rms_norm_eps,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_qkv", 8.0),
        ("attention_bias", True),
        # SGLang's model does not read these keys.
        ("norm_topk_prob", True),
        ("rms_norm_eps", 1e-6),
        ("num_key_value_heads", 2),
        ("head_dim", 32),
    ],
)
def test_an_olmoe_that_sglang_computes_otherwise_is_refused(tmp_path, key, value):
    assert refused_keys(tmp_path, config_of("olmoe") | {key: value}) == [key]


def test_norms_of_all_heads_are_cut_by_heads(tmp_path):
    """4 heads of 16: each of two ranks has 32 of the 64 weights."""
    shape = load_model_shape(written(tmp_path, config_of("olmoe")))
    tensors = numbered_tensors(shape)
    for part in ("q", "k"):
        whole = tensors[f"model.layers.1.self_attn.{part}_norm.weight"]
        parts = [
            fill(shape, Layout(tensor=2, expert_tensor=2), rank, tensors)[
                f"0:decoder.layers.1.self_attention.{part}_layernorm.weight"
            ]
            for rank in range(2)
        ]
        assert [len(p) for p in parts] == [32, 32]
        assert torch.equal(torch.cat(parts), whole)


def test_an_engine_of_two_ranks_does_not_compute_olmoe(tmp_path):
    shape = load_model_shape(written(tmp_path, config_of("olmoe")))
    assert engine_parameters(shape, EngineLayout(1), 0)
    with pytest.raises(LayoutError, match="tp_size: got 2"):
        engine_parameters(shape, EngineLayout(2), 0)
    assert list(engine_split_faults({"tp_size": 1}, shape)) == []
    (fault,) = engine_split_faults({"tp_size": 2}, shape)
    assert fault.startswith("sglang.tp_size: got 2")
