"""The supported model families, and the one reader of a config.json. A new family is a function at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dppo.model.errors import ModelConfigError, UnsupportedModelError
from megatron_dppo.model.family import (
    ATTENTION,
    DENSE_MLP,
    QK_NORM,
    QKV_BIAS,
    ConfigFacts,
    Family,
    ReadShape,
    expert_mlp,
    moe_router,
    read_decoder_shape,
)
from megatron_dppo.model.shape import ModelShape

FAMILIES: dict[str, Family] = {}
"""By their config.json's ``model_type``."""


def family_of(shape: ModelShape) -> Family:
    """The table that describes ``shape``."""
    return FAMILIES[shape.family]


def load_model_shape(hf_dir: str | Path) -> ModelShape:
    """Read ``hf_dir/config.json`` (or a config file itself).

    Raises ModelConfigError where there is none or it is no JSON, UnsupportedModelError, with all faults, for a family
    or entries outside the tables.
    """
    path = Path(hf_dir)
    path = path / "config.json" if path.is_dir() else path
    values = _read_json(path)
    model_type = values.get("model_type") if isinstance(values, dict) else None
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedModelError(
            [f"{path}: model_type {model_type!r}; supported families: {sorted(FAMILIES)}"]
        )
    facts = ConfigFacts(values, str(path))
    facts.require("architectures", [family.architecture], [family.architecture])
    shape = family.read(facts)
    if not facts.faults:
        # Between values that hold by themselves: a stand-in for a wrong one would only be blamed a second time.
        _check_relations(shape, facts)
    if facts.faults:
        raise UnsupportedModelError(facts.faults)
    return shape


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path}: no such file; expected a Hugging Face config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not a readable JSON file ({error})") from error


def _check_relations(shape: ModelShape, facts: ConfigFacts) -> None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        facts.fault(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
        )
    if shape.experts_per_token > shape.num_experts:
        facts.fault(
            f"num_experts_per_tok is {shape.experts_per_token}, expected at most the {shape.num_experts} experts"
        )


def declares(model_type: str, architecture: str, **tables: Any) -> Callable[[ReadShape], ReadShape]:
    """Put a family into FAMILIES, with the decorated function as its ``read``; arguments are Family's fields."""

    def add(read: ReadShape) -> ReadShape:
        FAMILIES[model_type] = Family(model_type, architecture, read, **tables)
        return read

    return add


@declares("llama", "LlamaForCausalLM", layer=(*ATTENTION, *DENSE_MLP))
def read_llama(facts: ConfigFacts) -> ModelShape:
    """Llama 2 and 3 (OctoThinker is Llama 3.2): no biases; ``llama3`` rotary scaling."""
    facts.require("attention_bias", False, False)
    facts.require("mlp_bias", False, False)
    return read_decoder_shape(facts, "llama")


@declares("qwen2", "Qwen2ForCausalLM", layer=(*ATTENTION, QKV_BIAS, *DENSE_MLP))
def read_qwen2(facts: ConfigFacts) -> ModelShape:
    """Qwen2 and Qwen2.5 dense (DeepSeek-R1-Distill-Qwen): biases on Q, K and V only."""
    return read_decoder_shape(facts, "qwen2")


@declares("qwen3", "Qwen3ForCausalLM", layer=(*ATTENTION, *QK_NORM, *DENSE_MLP))
def read_qwen3(facts: ConfigFacts) -> ModelShape:
    """Qwen3 dense (Qwen3-8B, Qwen3-1.7B): qk-norm, no biases."""
    facts.require("attention_bias", False, False)
    return read_decoder_shape(facts, "qwen3", head_dim_default=128)


@declares(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    layer=(*ATTENTION, *QK_NORM, *moe_router()),
    expert=expert_mlp(),
    megatron={"moe_router_score_function": "softmax"},
    engine_keeps_output=True,
)
def read_qwen3_moe(facts: ConfigFacts) -> ModelShape:
    """Qwen3-MoE (Qwen3-30B-A3B and kin): qk-norm, every layer's MLP routed, no shared expert."""
    facts.require("attention_bias", False, False)
    facts.require("decoder_sparse_step", 1, 1)
    facts.require("mlp_only_layers", [], [])
    return read_decoder_shape(
        facts,
        "qwen3_moe",
        num_experts=facts.positive("num_experts", "num_local_experts"),
        experts_per_token=facts.positive("num_experts_per_tok"),
        moe_ffn_hidden_size=facts.positive("moe_intermediate_size"),
        norm_topk_prob=facts.flag("norm_topk_prob", False),
    )
