"""The usual rows of a decoder's layers, and the reader of the entries that all families have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.model import splits
from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts
from megatron_dppo.model.rows import Rule, layer_rule
from megatron_dppo.model.shape import ModelShape


def read_decoder_shape(
    facts: ConfigFacts,
    *,
    head_dim_default: int | None = None,
    key_value_heads_default: int | None = None,
    theta_default: float = 1e4,
    rotary_fraction: float = 1,
    accepts_untruncated_yarn: bool = False,
    **extra: Any,
) -> ModelShape:
    """Read the entries that have the same names in all supported families.

    Args:
        facts: the file's entries.
        head_dim_default: transformers' default if the file has no ``head_dim``; None: hidden size / heads.
        key_value_heads_default: transformers' default if the file has no ``num_key_value_heads``; None: as many as
            ``num_attention_heads``.
        theta_default: transformers' default if the file has no ``rope_theta``.
        rotary_fraction: the part of each head that the family rotates.
        accepts_untruncated_yarn: whether the family's models may have YaRN, with ``truncate`` true or false.
        extra: fields of ModelShape to add or to replace.
    """
    facts.require("hidden_act", "silu", "silu")
    facts.require("use_sliding_window", False, False)
    if "delta" not in extra and "window" not in extra:
        facts.require_each("layer_types", "full_attention")
    heads = facts.positive("num_attention_heads")
    # transformers uses its default only if the key is absent. The value null means ``heads``.
    groups_default = heads
    if key_value_heads_default is not None and "num_key_value_heads" not in facts.values:
        groups_default = key_value_heads_default
    hidden = facts.positive("hidden_size")
    theta, scaling = facts.rope(
        rotary_fraction,
        theta_default=theta_default,
        accepts_yarn="latent" in extra or accepts_untruncated_yarn,
        accepts_untruncated_yarn=accepts_untruncated_yarn,
    )
    fields: dict[str, Any] = {
        "family": facts.values["model_type"],
        "num_layers": facts.positive("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": facts.positive("num_key_value_heads", default=groups_default),
        "head_dim": extra.get("head_dim")
        or facts.positive("head_dim", default=head_dim_default or max(1, hidden // heads)),
        "ffn_hidden_size": extra.get("ffn_hidden_size") or facts.positive("intermediate_size"),
        "vocab_size": facts.positive("vocab_size"),
        "tied_embeddings": facts.flag("tie_word_embeddings", False),
        "norm_eps": facts.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": facts.positive("max_position_embeddings"),
        "dtype": facts.dtype(),
        "rotary_fraction": rotary_fraction,
    }
    return ModelShape(**{**fields, **extra})


def read_dense_layers(facts: ConfigFacts) -> tuple[int, ...]:
    """Read which layers of a mixture of experts have a dense MLP.

    These are the first ``first_k_dense_replace`` layers, the layers in ``mlp_only_layers``, and the layers whose
    number, counted from 1, is no multiple of ``decoder_sparse_step``. This function is for added families whose SGLang
    model reads the same keys. No family of this package calls it.
    """
    first_layers = facts.count("first_k_dense_replace")
    listed_layers = facts.numbers("mlp_only_layers")
    step = facts.positive("decoder_sparse_step", default=1)
    dense_layers = []
    for layer in range(min(facts.positive("num_hidden_layers"), MOST_LAYERS)):
        if layer < first_layers or layer in listed_layers or (layer + 1) % step:
            dense_layers.append(layer)
    return tuple(dense_layers)


def rotary_size(facts: ConfigFacts, head_dim: int, default: float = 1) -> int:
    """Return the size of a head's rotated part, by ``partial_rotary_factor`` of the file or of its table of rotary
    parameters.

    ``default`` is the factor that transformers assumes if neither has the key. A factor that is no share of a head
    is ignored here; ``ConfigFacts.rope`` reports it.
    """
    tables = (facts.values, facts.values.get("rope_parameters"), facts.values.get("rope_scaling"))
    for table in tables:
        factor = table.get("partial_rotary_factor") if isinstance(table, Mapping) else None
        if isinstance(factor, int | float) and 0 < factor <= 1:
            return round(factor * head_dim)
    return round(default * head_dim)


def norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    """Return the rule of a norm's weight. Every rank holds the whole weight."""
    return layer_rule(megatron, splits.replicated, (hf, (dim,)))


def gemma_norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    """Return the rule of a GemmaRMSNorm's weight; SGLang keeps 1 + weight in a second tensor."""
    rule = norm(megatron, hf, dim)
    (row,) = rule.in_engine
    name = row.name.removesuffix("weight") + "gemma_weight"
    return replace(rule, engine=(row, replace(row, name=name, adds_one=True)))


def qkv(kind: str, *dims: str) -> Rule:
    """Return the rule of queries, keys and values. Megatron and SGLang both fuse them into one parameter.

    ``kind`` is weight or bias; ``dims`` names a weight's input dimension.
    """
    return layer_rule(
        f"self_attention.linear_qkv.{kind}",
        splits.query_groups,
        (f"self_attn.q_proj.{kind}", ("query", *dims)),
        (f"self_attn.k_proj.{kind}", ("kv", *dims)),
        (f"self_attn.v_proj.{kind}", ("kv", *dims)),
        engine=(f"self_attn.qkv_proj.{kind}", splits.stacked_heads),
    )


def moe_router(
    block: str = "mlp", engine_dtype: str | None = None, *, engine_block: str | None = None
) -> tuple[Rule, ...]:
    """Return two rules of a layer with experts: the norm before the experts, and the router.

    Args:
        block: the family's name of the module that has the router. The router's name in this module is ``gate``.
        engine_dtype: the type of SGLang's router if it is not the model's type.
        engine_block: SGLang's name of the module. None: ``block``.
    """
    return (
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        layer_rule(
            "mlp.router.weight",
            splits.replicated,
            (f"{block}.gate.weight", ("experts", "hidden")),
            engine=(f"{engine_block or block}.gate.weight", splits.replicated),
            engine_dtype=engine_dtype,
        ),
    )


def expert_mlp(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Return the rules of one expert's gated MLP, with the family's names in checkpoints. SGLang stacks all experts."""
    experts = f"{block}.experts."
    return (
        layer_rule(
            "mlp.experts.linear_fc1.weight{expert}",
            splits.column_parallel,
            (experts + f"{{expert}}.{gate}.weight", ("expert_ffn", "hidden")),
            (experts + f"{{expert}}.{up}.weight", ("expert_ffn", "hidden")),
            engine=(experts + "w13_weight[{expert}]", splits.column_parallel),
        ),
        layer_rule(
            "mlp.experts.linear_fc2.weight{expert}",
            splits.row_parallel,
            (experts + f"{{expert}}.{down}.weight", ("hidden", "expert_ffn")),
            engine=(experts + "w2_weight[{expert}]", splits.row_parallel),
        ),
    )


def shared_expert(block: str = "mlp.shared_expert") -> tuple[Rule, ...]:
    """Return the rules of a shared expert, a gated MLP for every token. ``block`` is its name in the family."""
    return (
        layer_rule(
            "mlp.shared_experts.linear_fc1.weight",
            splits.column_parallel,
            (f"{block}.gate_proj.weight", ("shared_ffn", "hidden")),
            (f"{block}.up_proj.weight", ("shared_ffn", "hidden")),
            engine=(f"{block}.gate_up_proj.weight", splits.column_parallel),
        ),
        layer_rule(
            "mlp.shared_experts.linear_fc2.weight",
            splits.row_parallel,
            (f"{block}.down_proj.weight", ("hidden", "shared_ffn")),
        ),
    )


SHARED_EXPERT_GATE = layer_rule(
    "mlp.shared_experts.gate_weight",
    splits.replicated,
    ("mlp.shared_expert_gate.weight", ("one", "hidden")),
)


QKV_BIAS = qkv("bias")


QK_NORM = (
    norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)


ATTENTION = (
    norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    qkv("weight", "hidden"),
    layer_rule(
        "self_attention.linear_proj.weight",
        splits.row_parallel,
        ("self_attn.o_proj.weight", ("hidden", "query")),
    ),
)


DENSE_MLP = (
    norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    layer_rule(
        "mlp.linear_fc1.weight",
        splits.column_parallel,
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
        engine=("mlp.gate_up_proj.weight", splits.column_parallel),
    ),
    layer_rule(
        "mlp.linear_fc2.weight", splits.row_parallel, ("mlp.down_proj.weight", ("hidden", "ffn"))
    ),
)
