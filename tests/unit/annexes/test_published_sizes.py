"""Larger models of families that have one folder in ``examples/model_configs``: the parameters of their model cards.

The folder's config.json, with the changes below, describes a larger model. The values are from public training scripts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.cluster.planner.facts import rank_parameters
from megatron_dppo.model.families import load_model_shape, with_language_model_values
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import active_parameters

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "model_configs"
QWEN3_5 = {
    "num_attention_heads": 32, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
    "linear_num_value_heads": 64, "layer_types": None,
}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "GLM-4.5 and 4.7 (355B-A32B)": (
        "glm-4.5-air",
        {
            "hidden_size": 5120, "num_hidden_layers": 92, "first_k_dense_replace": 3, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 2.5, "use_qk_norm": True,
        },
        355e9,
        32e9,
    ),
    "Qwen2-57B-A14B": (
        "qwen1.5-moe-a2.7b",
        {
            "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
            "num_experts_per_tok": 8, "intermediate_size": 18944,
        },
        57.41e9,
        14e9,
    ),
    "Qwen3.5-122B-A10B": (
        "qwen3.5-35b-a3b",
        {**QWEN3_5, "hidden_size": 3072, "num_hidden_layers": 48},
        122e9,
        10e9,
    ),
    "Qwen3.5-397B-A17B": (
        "qwen3.5-35b-a3b",
        {
            **QWEN3_5, "hidden_size": 4096, "num_hidden_layers": 60, "num_experts": 512, "num_experts_per_tok": 10,
        },
        397e9,
        17e9,
    ),
}  # fmt: skip
"""Model -> the folder, changes to its config.json, and the card's parameters: all, and those that a token uses."""


@pytest.mark.parametrize("name", SIZES)
def test_the_tables_and_the_planner_count_the_parameters_of_the_card(
    tmp_path: Path, name: str
) -> None:
    folder, changes, published, published_active = SIZES[name]
    values = json.loads((CONFIGS / folder / "config.json").read_text())
    changed = with_language_model_values(values, changes)
    (tmp_path / "config.json").write_text(json.dumps(changed))
    shape = load_model_shape(tmp_path)
    counted = sum(math.prod(dims) for dims in hf_tensors(shape).values())
    assert counted == pytest.approx(published, rel=0.01)
    # Cards count the embedding, too.
    active = active_parameters(shape) + shape.vocab_size * shape.hidden_size
    assert active == pytest.approx(published_active, rel=0.06)
    assert rank_parameters(shape, Layout(), 0).elements == counted
