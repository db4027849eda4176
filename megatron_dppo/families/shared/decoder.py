"""The usual rows of a decoder's layers."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.model import splits
from megatron_dppo.model.rows import Rule, layer_rule


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
