"""gpt-oss."""

from __future__ import annotations

from typing import Any

from megatron_dppo.families.shared.decoder import ATTENTION, QKV_BIAS, norm
from megatron_dppo.families.shared.reading import read_decoder_shape
from megatron_dppo.model import splits
from megatron_dppo.model.config_facts import MOST_LAYERS, ConfigFacts, Entries
from megatron_dppo.model.families import Family
from megatron_dppo.model.rows import HF_LAYER, PackedExperts, layer_rule
from megatron_dppo.model.shape import AttentionWindow, ModelShape
from megatron_dppo.model.tiny_sizes import TinySizes

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotary parameters that transformers assumes for a gpt-oss without a table of them."""


def _packed(name: str, *, transposed: bool) -> PackedExperts:
    """Return the packed tensor ``name`` of a gpt-oss file.

    Packed weights are transposed (``gate_up_proj``), packed biases are not (``gate_up_proj_bias``).
    """
    kind = "weight" if transposed else "bias"
    matrix = f"{HF_LAYER}mlp.experts.{{expert}}.{name.removesuffix('_bias')}.{kind}"
    return PackedExperts(f"{HF_LAYER}mlp.experts.{name}", (matrix,), transposed)


_EXPERT = (
    layer_rule(
        "mlp.experts.linear_fc1.weight{expert}",
        splits.gates_then_ups,
        ("mlp.experts.{expert}.gate_up_proj.weight", ("expert_gate_up", "hidden")),
        engine=("mlp.experts.w13_weight[{expert}]", splits.column_parallel),
    ),
    layer_rule(
        "mlp.experts.linear_fc1.bias{expert}",
        splits.gates_then_ups,
        ("mlp.experts.{expert}.gate_up_proj.bias", ("expert_gate_up",)),
        engine=("mlp.experts.w13_weight_bias[{expert}]", splits.column_parallel),
        engine_dtype="float32",
    ),
    layer_rule(
        "mlp.experts.linear_fc2.weight{expert}",
        splits.row_parallel,
        ("mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),
        engine=("mlp.experts.w2_weight[{expert}]", splits.row_parallel),
    ),
    layer_rule(
        "mlp.experts.linear_fc2.bias{expert}",
        splits.replicated,
        ("mlp.experts.{expert}.down_proj.bias", ("hidden",)),
        engine=("mlp.experts.w2_weight_bias[{expert}]", splits.on_first_rank),
        engine_dtype="float32",
    ),
)
"""An expert of gpt-oss: the rows of its first matrix are gates and ups in turn, also in SGLang."""


_LAYER = (
    *ATTENTION,
    QKV_BIAS,
    layer_rule(
        "self_attention.linear_proj.bias", splits.replicated, ("self_attn.o_proj.bias", ("hidden",))
    ),
    layer_rule(
        "self_attention.core_attention.softmax_offset",
        splits.column_parallel,
        ("self_attn.sinks", ("heads",)),
    ),
    norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    layer_rule(
        "mlp.router.weight", splits.replicated, ("mlp.router.weight", ("experts", "hidden"))
    ),
    layer_rule("mlp.router.bias", splits.replicated, ("mlp.router.bias", ("experts",))),
)


def _read_window(facts: ConfigFacts) -> AttentionWindow:
    """Read the size of windows, and the layers that attend to a window only. ``layer_types`` has each layer's kind.
    Without ``layer_types`` every other layer has a window, from the first layer on."""
    kinds = facts.values.get("layer_types")
    layers = min(facts.positive("num_hidden_layers"), MOST_LAYERS)
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    facts.ignore("layer_types")
    known_kinds = ("sliding_attention", "full_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in known_kinds for kind in kinds)
    ):
        facts.fault(
            f"layer_types is {kinds!r}, expected one of {known_kinds} for each of {layers} layers"
        )
        kinds = []
    windows = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return AttentionWindow(facts.positive("sliding_window", default=128), windows)


def read(facts: ConfigFacts) -> ModelShape:
    """gpt-oss (gpt-oss-20b, gpt-oss-120b): attention with sinks, windows in every other layer, biases everywhere."""
    facts.require("attention_bias", True, True)
    facts.require("swiglu_alpha", 1.702, 1.702)
    facts.require("hidden_act_alpha", 1.702, 1.702)
    experts_per_token = facts.positive("num_experts_per_tok", default=4)
    # The model's first code has two other names: ``experts_per_token``, and ``initial_context_length`` for
    # ``original_max_position_embeddings``.
    facts.require("experts_per_token", experts_per_token, experts_per_token)
    facts.ignore("initial_context_length")
    if facts.values.get("rope_parameters") is None and not facts.values.get("rope_scaling"):
        facts = facts.of_table({**facts.values, "rope_parameters": _ROPE})
    width = facts.positive("intermediate_size")
    return read_decoder_shape(
        facts,
        head_dim_default=64,
        key_value_heads_default=8,
        theta_default=150_000,
        accepts_untruncated_yarn=True,
        num_experts=facts.positive("num_local_experts", "num_experts"),
        experts_per_token=experts_per_token,
        ffn_hidden_size=width,
        moe_ffn_hidden_size=width,
        norm_topk_prob=True,
        norm_eps=facts.number("rms_norm_eps", 1e-5),
        window=_read_window(facts),
        has_sinks=True,
        has_biases=True,
        glu_limit=facts.number("swiglu_limit", 7.0),
    )


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return the experts of a token under their second name, and a window that a rehearsal's sequences exceed."""
    tiny: dict[str, Any] = {}
    if "experts_per_token" in values:
        tiny["experts_per_token"] = sizes.choices
    if shape.window is not None:
        tiny["sliding_window"] = min(16, shape.window.tokens)
    return tiny


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    read,
    layer=_LAYER,
    expert=_EXPERT,
    packed=(
        _packed("gate_up_proj", transposed=True),
        _packed("gate_up_proj_bias", transposed=False),
        _packed("down_proj", transposed=True),
        _packed("down_proj_bias", transposed=False),
    ),
    engine_keeps_output=True,
    needs_direct_placement=True,
    engine_has_config_dtype=True,
    cpu_engine="megatron_dppo.families.gpt_oss.cpu_engine:use_sinks",
    tiny_values=tiny_values,
)
