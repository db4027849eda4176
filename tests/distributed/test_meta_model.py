"""Megatron's modules of the full Qwen3-30B-A3B, built on the meta device, have the shapes of the conversion rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PIPELINE = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.expert=4"]  # fmt: skip
UNEVEN = [
    *PIPELINE,
    "parallel.pipeline=4",
    "parallel.first_stage_layers=6",
    "parallel.last_stage_layers=10",
]
CASES = {
    # 48 layers of 7 dense parameters and 2 for each of 16 experts; embedding, final norm, output; ranks 0 and 15.
    "TP4 EP8": ([], 2 * (48 * (7 + 2 * 16) + 3)),
    # 24 layers and 32 experts on the first stage and on the last. One has the embedding, the other norm and output.
    "TP2 PP2 VPP2 EP4": (PIPELINE, 2 * 24 * (7 + 2 * 32) + 3),
    # 6 layers on the first stage, 10 on the last, 16 on each of the others.
    "TP2 PP4 VPP2 EP4": (UNEVEN, (6 + 10) * (7 + 2 * 32) + 3),
}


def worker() -> dict[str, Any]:
    """Return (ranks, parameters, faults) of each case, and the report on shapes that differ."""
    from megatron_dppo.config import load_config
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.trainer.model import compare_with_rules, differences

    shape = load_model_shape(ROOT / "examples" / "model_configs" / "qwen3-30b-a3b-base")
    recipe = ROOT / "examples" / "recipes" / "qwen3_30b_a3b_base.yaml"
    out: dict[str, Any] = {}
    for name, (changes, _) in CASES.items():
        found = compare_with_rules(load_config(recipe, changes), shape)
        out[name] = [list(found.ranks), found.parameters, list(found.faults)]
    megatron_shapes = {(0, "a.weight"): (2, 3), (0, "b.weight"): (4,)}
    rule_shapes = {(0, "a.weight"): (3, 2), (1, "c.weight"): (5,)}
    out["differences"] = list(differences(megatron_shapes, rule_shapes))
    return out


@pytest.mark.distributed
def test_every_shape_is_as_the_rules_say() -> None:
    (found,) = run_ranks("tests.distributed.test_meta_model:worker", 1)
    for name, (_, parameters) in CASES.items():
        assert found[name] == [[0, 15], parameters, []]
    assert found["differences"] == [
        "chunk 0, a.weight: Megatron has (2, 3), expected (3, 2) by the rules",
        "chunk 0, b.weight: Megatron has (4,), expected none by the rules",
        "chunk 1, c.weight: Megatron has none, expected (5,) by the rules",
    ]
