"""Qwen3.5: a language model and a vision tower, and the language model alone."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron_dppo.families.shared import decoder, delta_net
from megatron_dppo.model import rows, splits
from megatron_dppo.model.config_facts import ConfigFacts, Entries
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.tiny_sizes import TinySizes

_INPUTS = (
    ("linear_attn.in_proj_qkv.weight", ("delta_qkv", "hidden")),
    ("linear_attn.in_proj_z.weight", ("delta_values", "hidden")),
    ("linear_attn.in_proj_b.weight", ("delta_heads", "hidden")),
    ("linear_attn.in_proj_a.weight", ("delta_heads", "hidden")),
)
DELTA_INPUTS = replace(
    rows.layer_rule("self_attention.in_proj.weight", splits.delta_sections, *_INPUTS),
    engine=(
        rows.engine_row("linear_attn.in_proj_qkvz.weight", splits.delta_sections, *_INPUTS[:2]),
        rows.engine_row("linear_attn.in_proj_ba.weight", splits.column_parallel, *_INPUTS[2:]),
    ),
)
"""The input matrices of a delta net if checkpoints and SGLang order their rows by kind: queries, keys, values, the
values' gates, and the two numbers of each value head."""


def _of_server_type(rule: rows.Rule) -> rows.Rule:
    """Return ``rule``. SGLang's tensors of CONFIG_DTYPE have the type of the server's weights instead."""
    engine_rows = []
    for row in rule.in_engine:
        is_of_config = row.dtype == rows.CONFIG_DTYPE
        engine_rows.append(replace(row, dtype=None) if is_of_config else row)
    return replace(rule, engine=tuple(engine_rows))


_HYBRID_LAYER = (
    *rows.in_layers(rows.attention_layers, *delta_net.gated_attention()),
    *rows.in_layers(rows.delta_layers, *map(_of_server_type, delta_net.DELTA_NET), DELTA_INPUTS),
    *delta_net.HYBRID_MOE,
)


def _engine_keys(shape: ModelShape) -> Entries:
    keys = dict(delta_net.hybrid_engine_keys(shape))
    # SGLang reads rope_theta in the table of rotary parameters.
    del keys["rope_theta"]
    return keys


def in_language_model(*rules: rows.Rule) -> tuple[rows.Rule, ...]:
    """Return ``rules`` with the source names of a language model that is a part of a larger model.

    SGLang's names stay as they are.
    """
    renamed_rules = []
    for rule in rules:
        engine_rows = []
        for row in rule.in_engine:
            engine_rows.append(replace(row, sources=_in_language_model(row.sources)))
        sources = _in_language_model(rule.sources)
        renamed_rules.append(replace(rule, sources=sources, engine=tuple(engine_rows)))
    return tuple(renamed_rules)


def _in_language_model(sources: tuple[rows.Source, ...]) -> tuple[rows.Source, ...]:
    renamed_sources = []
    for source in sources:
        name = re.sub(r"^model\.", "model.language_model.", source.name)
        renamed_sources.append(replace(source, name=name))
    return tuple(renamed_sources)


_LANGUAGE_MODEL_EXPERT = in_language_model(*decoder.expert_mlp())


def read_language_model(facts: ConfigFacts) -> ModelShape:
    """Qwen3.5's language model without the vision tower: Qwen3-Next with other input matrices of delta nets."""
    # The router always renormalises.
    facts.require("norm_topk_prob", True, True)
    # Checkpoints carry the layer that predicts further tokens.
    facts.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    # These keys divide the rotary dimensions among three axes. A token of text has the same position on all axes.
    facts.ignore("mrope_section", "mrope_interleaved")
    return delta_net.read_hybrid_moe(facts)


TEXT_FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    read_language_model,
    layer=_HYBRID_LAYER,
    expert=decoder.expert_mlp(),
    final_norm=delta_net.GEMMA_FINAL_NORM,
    carries=rows.with_prefix("mtp."),
    engine_keys=_engine_keys,
    engine_options={"disable_shared_experts_fusion": True},
    trainer_layers=delta_net.TRAINER_LAYERS,
    cpu_engine=delta_net.CPU_ENGINE,
    tiny_values=delta_net.tiny_values,
    has_head_dim=True,
)


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen3.5 (Qwen3.5-35B-A3B): a language model, and a vision tower that checkpoints carry along."""
    facts.ignore("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    facts.ignore("vision_config", "language_model_only")
    return read_language_model(facts)


def tiny_values(shape: ModelShape, values: Entries, sizes: TinySizes) -> Entries:
    """Return the sizes of delta nets, and of a vision tower. A rehearsal writes the tower but does not run it."""
    tiny = delta_net.tiny_values(shape, values, sizes)
    if "vision_config" not in values:
        return tiny
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    tower["out_hidden_size"] = sizes.hidden
    return {**tiny, "vision_config": {**values["vision_config"], **tower}}


FAMILY = replace(
    TEXT_FAMILY,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    read=read,
    layer=in_language_model(*_HYBRID_LAYER),
    expert=_LANGUAGE_MODEL_EXPERT,
    embedding=in_language_model(rows.EMBEDDING)[0],
    final_norm=in_language_model(delta_net.GEMMA_FINAL_NORM)[0],
    packed=rows.packed_experts_of(_LANGUAGE_MODEL_EXPERT, "gate_up_proj", "down_proj"),
    carries=rows.with_prefix("mtp.", "model.visual."),
    text_table="text_config",
    # Servers receive no images, and the vision tower is not sent to them, so SGLang must not build the tower.
    outer_engine_keys={"language_model_only": True},
    tiny_values=tiny_values,
)
