"""The rows of a family's table, and the rows that families share.

Names are templates: ``{layer}`` is the layer's number (global on the Hugging Face side, local to its pipeline chunk on
Megatron's) and ``{expert}`` the expert's (global, and local to its expert-parallel rank). Megatron's names are those of
Megatron-Core 0.16's GPTModel with the Transformer Engine layer spec; SGLang's are those of release 0.5.23, unquantised,
with the canonical (Triton or native) layout of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.model import splits


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name template and symbolic dimensions (keys of ``ModelShape.sizes``)."""

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class EngineRow:
    """An SGLang parameter that fuses the same sources: name template and cut."""

    name: str
    split: splits.Split


@dataclass(frozen=True)
class Rule:
    """Megatron parameter <- Hugging Face tensors, cut by ``split``.

    ``engine``: what SGLang makes of the same tensors; None: one parameter of the Hugging Face name, cut
    as Megatron cuts it, a vocabulary padded SGLang's way.
    """

    megatron: str
    split: splits.Split
    sources: tuple[Source, ...]
    engine: EngineRow | None = None

    @property
    def tensor_parallel(self) -> bool:
        """Whether ranks of a tensor-parallel group hold different parts."""
        return self.split is not splits.replicated

    @property
    def in_engine(self) -> EngineRow:
        """SGLang's parameter of the same sources."""
        if self.engine is not None:
            return self.engine
        is_vocabulary = self.split is splits.vocabulary
        return EngineRow(
            self.sources[0].name, splits.engine_vocabulary if is_vocabulary else self.split
        )


MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def layer_rule(
    megatron: str,
    split: splits.Split,
    *sources: tuple[str, tuple[str, ...]],
    engine: tuple[str, splits.Split] | None = None,
) -> Rule:
    """A row whose names are given without the layer's prefix; ``engine``: SGLang's name and cut where it fuses."""
    return Rule(
        MEGATRON_LAYER + megatron,
        split,
        tuple(Source(HF_LAYER + name, dims) for name, dims in sources),
        None if engine is None else EngineRow(HF_LAYER + engine[0], engine[1]),
    )


def norm(megatron: str, hf: str, dim: str = "hidden") -> Rule:
    """A norm's weight, whole on every rank."""
    return layer_rule(megatron, splits.replicated, (hf, (dim,)))


def qkv(kind: str, *dims: str) -> Rule:
    """Weights (``dims``: their input) or biases of the three projections, fused into one on both sides."""
    return layer_rule(
        f"self_attention.linear_qkv.{kind}",
        splits.query_groups,
        (f"self_attn.q_proj.{kind}", ("query", *dims)),
        (f"self_attn.k_proj.{kind}", ("kv", *dims)),
        (f"self_attn.v_proj.{kind}", ("kv", *dims)),
        engine=(f"self_attn.qkv_proj.{kind}", splits.stacked_heads),
    )


def moe_router(block: str = "mlp") -> tuple[Rule, ...]:
    """The norm before a layer's experts and their router; ``block``: what the family calls the MoE layer."""
    return (
        norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        layer_rule(
            "mlp.router.weight", splits.replicated, (f"{block}.gate.weight", ("experts", "hidden"))
        ),
    )


def expert_mlp(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """One expert's gated MLP, under the names that the family gives it on disk; SGLang stacks all experts."""
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
EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    splits.vocabulary,
    (Source("model.embed_tokens.weight", ("vocab", "hidden")),),
)
FINAL_NORM = Rule(
    "decoder.final_layernorm.weight",
    splits.replicated,
    (Source("model.norm.weight", ("hidden",)),),
)
OUTPUT = Rule(
    "output_layer.weight", splits.vocabulary, (Source("lm_head.weight", ("vocab", "hidden")),)
)
