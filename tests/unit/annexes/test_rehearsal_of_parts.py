"""Rehearsals of a model with further parts than its language model."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.cluster.known_models import KnownModel
from megatron_dppo.cluster.rehearsal.tiny_model import tiny_config
from megatron_dppo.cluster.rehearsal.tiny_sizes import tiny_sizes
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.layout import LayoutSizes
from tests.unit.families.test_qwen3_5_moe import NAME, PUBLISHED
from tests.unit.published_configs import published, written


def test_a_rehearsal_has_the_same_parts(tmp_path: Path) -> None:
    known = KnownModel(published(NAME), load_model_shape(PUBLISHED))
    layout = LayoutSizes(world_size=2, expert=2)
    values = tiny_config(known, tiny_sizes(layout, known.shape, 64), own_tokenizer=False)
    assert values["vision_config"]["out_hidden_size"] == values["text_config"]["hidden_size"]
    small = load_model_shape(written(tmp_path, values))
    assert small.family == "qwen3_5_moe"
    assert small.delta is not None
    assert small.vocab_size < 1000
