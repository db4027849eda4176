"""Hybrid models: gated delta nets, gated attention in every n-th layer, norms that multiply by 1 + their weight, and
experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.families.shared import decoder, reading
from megatron_dppo.model import splits
from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts, Entries
from megatron_dppo.model.rows import CONFIG_DTYPE, FINAL_NORM, Rule, layer_rule
from megatron_dppo.model.shape import DeltaNet, ModelShape
from megatron_dppo.model.tiny_sizes import HEAD_DIM, TinySizes


def _delta_rule(
    megatron: str,
    split: splits.Split,
    hf: str,
    *dims: str,
    dtype: str | None = None,
    engine_dtype: str | None = None,
) -> Rule:
    """Return a row of a delta net with one source. The names lack the prefixes ``self_attention.`` and
    ``linear_attn.``."""
    return layer_rule(
        f"self_attention.{megatron}",
        split,
        (f"linear_attn.{hf}", dims),
        dtype=dtype,
        engine_dtype=engine_dtype,
    )


def _in_files(dtype: str, rule: Rule) -> Rule:
    """Return ``rule`` with sources that may have the type ``dtype`` in files."""
    sources = tuple(replace(source, file_dtype=dtype) for source in rule.sources)
    return replace(rule, sources=sources)


DELTA_NET = (
    decoder.gemma_norm("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight"),
    _delta_rule(
        "conv1d.weight", splits.delta_sections, "conv1d.weight", "delta_qkv", "one", "delta_kernel"
    ),
    _delta_rule("dt_bias", splits.column_parallel, "dt_bias", "delta_heads"),
    # Some checkpoints have A_log and the output norm in fp32, and all other tensors in bfloat16. For the output norm,
    # ``dtype`` allows fp32 in files, too.
    _in_files(
        "float32",
        _delta_rule(
            "A_log", splits.column_parallel, "A_log", "delta_heads", engine_dtype="float32"
        ),
    ),
    _delta_rule(
        "out_norm.weight",
        splits.replicated,
        "norm.weight",
        "delta_head",
        dtype="float32",
        engine_dtype=CONFIG_DTYPE,
    ),
    _delta_rule(
        "out_proj.weight", splits.row_parallel, "out_proj.weight", "hidden", "delta_values"
    ),
)
"""The rules of a delta net, except the input matrices: families divide these differently."""


def gated_attention() -> tuple[Rule, ...]:
    """Return the rules of attention with a gate. SGLang's names lack ``self_attn.``."""
    query_norm = decoder.gemma_norm(
        "self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"
    )
    key_norm = decoder.gemma_norm(
        "self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"
    )
    rules = (
        layer_rule(
            "self_attention.linear_qkv.weight",
            splits.gated_query_groups,
            ("self_attn.q_proj.weight", ("gated_query", "hidden")),
            ("self_attn.k_proj.weight", ("kv", "hidden")),
            ("self_attn.v_proj.weight", ("kv", "hidden")),
            engine=("self_attn.qkv_proj.weight", splits.stacked_heads),
        ),
        layer_rule(
            "self_attention.linear_proj.weight",
            splits.row_parallel,
            ("self_attn.o_proj.weight", ("hidden", "query")),
        ),
        query_norm,
        key_norm,
    )
    input_norm = decoder.gemma_norm(
        "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
    )
    return (input_norm, *(_without_block(rule) for rule in rules))


def _without_block(rule: Rule) -> Rule:
    rows = tuple(replace(row, name=row.name.replace("self_attn.", "")) for row in rule.in_engine)
    return replace(rule, engine=rows)


HYBRID_MOE = (
    # These two rules replace the two rules of ``moe_router``: another norm, and the same router.
    decoder.gemma_norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    decoder.moe_router()[1],
    *decoder.shared_expert(),
    decoder.SHARED_EXPERT_GATE,
)
"""The rules of a softmax router and a gated shared expert, after a norm that multiplies by 1 + its weight."""


GEMMA_FINAL_NORM = replace(
    FINAL_NORM,
    engine=(
        *FINAL_NORM.in_engine,
        replace(FINAL_NORM.in_engine[0], name="model.norm.gemma_weight", adds_one=True),
    ),
)
TRAINER_LAYERS = "megatron_dppo.families.shared.delta_net.trainer:use_packed_delta_nets"
CPU_ENGINE = "megatron_dppo.families.shared.delta_net.cpu_engine:use_pytorch"


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return the sizes of delta nets. The interval is at most the number of layers, so that a layer has attention."""
    delta = shape.delta
    if delta is None:
        return {}
    return {
        "full_attention_interval": min(delta.attention_interval, sizes.layers),
        # Trainer and servers divide the key heads like the heads of attention.
        "linear_num_key_heads": sizes.heads,
        "linear_num_value_heads": sizes.heads * delta.value_heads // delta.key_heads,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
    }


def read_hybrid_moe(facts: ConfigFacts) -> ModelShape:
    """Read a model with delta nets, gated attention in every n-th layer, and experts and a gated shared expert in all
    layers."""
    facts.require("attention_bias", False, False)
    facts.require("attn_output_gate", True, True)
    facts.require("output_gate_type", "swish", "swish")
    facts.require("mamba_ssm_dtype", "float32", "float32")
    facts.ignore("intermediate_size")
    interval = facts.positive("full_attention_interval", default=_attention_interval(facts))
    layers = min(facts.positive("num_hidden_layers"), MOST_LAYERS)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    facts.require("layer_types", kinds, kinds)
    delta = DeltaNet(
        interval,
        facts.positive("linear_num_key_heads"),
        facts.positive("linear_num_value_heads"),
        facts.positive("linear_key_head_dim"),
        facts.positive("linear_value_head_dim"),
        facts.positive("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        facts.fault(
            f"linear_num_value_heads is {delta.value_heads}, expected a multiple of the {delta.key_heads} key heads"
        )
    head_dim = facts.positive("head_dim", default=256)
    shared_width = facts.positive("shared_expert_intermediate_size")
    return reading.read_decoder_shape(
        facts,
        key_value_heads_default=2,
        # No layer has a dense MLP of this width.
        ffn_hidden_size=shared_width,
        rotary_fraction=reading.rotary_size(facts, head_dim, default=0.25) / head_dim,
        head_dim=head_dim,
        num_experts=facts.positive("num_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", True),
        shared_ffn_hidden_size=shared_width,
        gates_shared_expert=True,
        delta=delta,
        gates_attention=True,
        norms_add_one=True,
    )


def _attention_interval(facts: ConfigFacts) -> int:
    """Return the interval of the layers with attention, from the list of layer types: transformers 5 saves only this
    list."""
    kinds = facts.values.get("layer_types")
    if isinstance(kinds, list) and "full_attention" in kinds:
        return kinds.index("full_attention") + 1
    return 4


def hybrid_engine_keys(shape: ModelShape) -> Entries:
    interval = 0 if shape.delta is None else shape.delta.attention_interval
    return {
        "full_attention_interval": interval,
        "partial_rotary_factor": shape.rotary_fraction,
        "rope_theta": shape.rope_theta,
    }
