"""Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace

from megatron_dppo.families.shared import decoder, delta_net
from megatron_dppo.model import rows, splits
from megatron_dppo.model.config_facts import ConfigFacts
from megatron_dppo.model.families import Family
from megatron_dppo.model.shape import ModelShape

_FUSED_INPUTS = (
    ("linear_attn.in_proj_qkvz.weight", ("delta_qkvz", "hidden")),
    ("linear_attn.in_proj_ba.weight", ("delta_ba", "hidden")),
)
DELTA_INPUTS_BY_HEAD = replace(
    rows.layer_rule("self_attention.in_proj.weight", splits.delta_inputs_by_head, *_FUSED_INPUTS),
    engine=tuple(
        rows.engine_row(source[0], splits.column_parallel, source) for source in _FUSED_INPUTS
    ),
)
"""The input matrices of a delta net if checkpoints and SGLang order their rows by key head."""


def read(facts: ConfigFacts) -> ModelShape:
    """Qwen3-Next: gated delta nets, gated attention in every fourth layer, norms that multiply by 1 + their weight."""
    return delta_net.read_hybrid_moe(facts)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    read,
    layer=(
        *rows.in_layers(rows.attention_layers, *delta_net.gated_attention()),
        *rows.in_layers(rows.delta_layers, *delta_net.DELTA_NET, DELTA_INPUTS_BY_HEAD),
        *delta_net.HYBRID_MOE,
    ),
    expert=decoder.expert_mlp(),
    final_norm=delta_net.GEMMA_FINAL_NORM,
    carries=rows.with_prefix("mtp."),
    engine_keys=delta_net.hybrid_engine_keys,
    attention_replicas=True,
    trainer_layers=delta_net.TRAINER_LAYERS,
    cpu_engine=delta_net.CPU_ENGINE,
    has_head_dim=True,
    tiny_values=delta_net.tiny_values,
)
