"""The rows of a family's table, and the rows that families share.

Names are templates: ``{layer}`` is the layer's number (global on the Hugging Face side, local to its pipeline chunk on
Megatron's) and ``{expert}`` the expert's (global, and local to its expert-parallel rank). Megatron's names are those of
Megatron-Core 0.16's GPTModel with the Transformer Engine layer spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_dppo.model import splits
from megatron_dppo.model.shape import ConfigFacts, ModelShape


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name template and symbolic dimensions (keys of ``ModelShape.sizes``)."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """Megatron parameter <- Hugging Face tensors, cut by ``split``."""

    megatron: str
    split: splits.Split
    sources: tuple[Source, ...]

    @property
    def tensor_parallel(self) -> bool:
        """Whether ranks of a tensor-parallel group hold different parts."""
        return self.split is not splits.replicated


@dataclass(frozen=True)
class Family:
    """A model family: how to read its config.json, and its table in model order.

    ``read``: ModelShape from the file's facts; raises UnsupportedModelError for features outside the table.
    ``layer``: rows once a layer, before the experts. ``expert``: rows once an expert of a layer.
    """

    model_type: str
    read: Callable[[ConfigFacts], ModelShape]
    layer: tuple[Rule, ...]
    expert: tuple[Rule, ...] = ()
    embedding: Rule = Rule(
        "embedding.word_embeddings.weight",
        splits.vocabulary,
        (Source("model.embed_tokens.weight", ("vocab", "hidden")),),
    )
    final_norm: Rule = Rule(
        "decoder.final_layernorm.weight",
        splits.replicated,
        (Source("model.norm.weight", ("hidden",)),),
    )
    output: Rule = Rule(
        "output_layer.weight", splits.vocabulary, (Source("lm_head.weight", ("vocab", "hidden")),)
    )


_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def layer_rule(megatron: str, split: splits.Split, *sources: tuple[str, tuple[str, ...]]) -> Rule:
    """A row whose names are given without the layer's prefix."""
    return Rule(
        _MEGATRON + megatron, split, tuple(Source(_HF + name, dims) for name, dims in sources)
    )


def _qkv(kind: str, *dims: str) -> Rule:
    return layer_rule(
        f"self_attention.linear_qkv.{kind}",
        splits.query_groups,
        (f"self_attn.q_proj.{kind}", ("query", *dims)),
        (f"self_attn.k_proj.{kind}", ("kv", *dims)),
        (f"self_attn.v_proj.{kind}", ("kv", *dims)),
    )


def _norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    return layer_rule(megatron, splits.replicated, (hf, (dim,)))


QKV_BIAS = _qkv("bias")
QK_NORM = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)
ATTENTION = (
    _norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _qkv("weight", "hidden"),
    layer_rule(
        "self_attention.linear_proj.weight",
        splits.row_parallel,
        ("self_attn.o_proj.weight", ("hidden", "query")),
    ),
)
DENSE_MLP = (
    _norm("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    layer_rule(
        "mlp.linear_fc1.weight",
        splits.column_parallel,
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    layer_rule(
        "mlp.linear_fc2.weight", splits.row_parallel, ("mlp.down_proj.weight", ("hidden", "ffn"))
    ),
)
MOE_ROUTER = (
    _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    layer_rule("mlp.router.weight", splits.replicated, ("mlp.gate.weight", ("experts", "hidden"))),
)
EXPERT_MLP = (
    layer_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        splits.column_parallel,
        ("mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
        ("mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
    ),
    layer_rule(
        "mlp.experts.linear_fc2.weight{expert}",
        splits.row_parallel,
        ("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),
    ),
)
