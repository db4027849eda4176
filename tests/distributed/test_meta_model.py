"""Megatron's own modules of the full Qwen3-30B-A3B, built without memory, have the shapes of the conversion's rules."""

from pathlib import Path

import pytest

from megatron_dppo.config import load_config
from megatron_dppo.model.reader import load_model_shape

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "recipes" / "qwen3_30b_a3b_base.yaml"
SHAPE = load_model_shape(ROOT / "examples" / "model_configs" / "qwen3-30b-a3b-base")
PIPELINE = (
    "parallel.tensor=2",
    "parallel.pipeline=2",
    "parallel.virtual_pipeline=2",
    "parallel.expert=4",
)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # 48 layers of 7 dense parameters and 2 for each of 16 experts; embedding, final norm, output.
        ((), 2 * (48 * (7 + 2 * 16) + 3)),
        # 24 layers and 32 experts on the first stage and on the last, with the ends shared out.
        (PIPELINE, 2 * 24 * (7 + 2 * 32) + 3),
    ],
    ids=["TP4 EP8", "TP2 PP2 VPP2 EP4"],
)
def test_every_shape_is_as_the_rules_say(changes, parameters):
    from megatron_dppo.trainer.meta_model import compare

    found = compare(load_config(RECIPE, changes), SHAPE)
    assert found.problems == ()
    assert found.parameters == parameters
    assert found.ranks == (0, 15)


def test_what_differs_is_named():
    from megatron_dppo.trainer.meta_model import differences

    made = {(0, "a.weight"): (2, 3), (0, "b.weight"): (4,)}
    expected = {(0, "a.weight"): (3, 2), (1, "c.weight"): (5,)}
    assert list(differences(made, expected)) == [
        "chunk 0, a.weight: Megatron has (2, 3), expected (3, 2) by the rules",
        "chunk 0, b.weight: Megatron has (4,), expected none by the rules",
        "chunk 1, c.weight: Megatron has none, expected (5,) by the rules",
    ]
