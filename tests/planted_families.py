"""Families that only tests have: rows that no supported family has yet, over models that transformers can build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from megatron_dppo.model import families
from megatron_dppo.model.families import FAMILIES, ConfigFacts, Family
from megatron_dppo.model.shape import ModelShape


def read_mixed(facts: ConfigFacts) -> ModelShape:
    """Qwen3-MoE with the dense layers that its config.json has in transformers, which SGLang's model does not read."""
    shape = families.read_qwen3_moe(facts)
    return replace(shape, dense_layers=families.read_dense_layers(facts))


def mixed_family() -> Family:
    """The table of Qwen3-MoE with dense layers."""
    layer = (
        *families.ATTENTION,
        *families.QK_NORM,
        *families.in_layers(families.dense_layers, *families.DENSE_MLP),
        *families.in_layers(families.routed_layers, *families.moe_router()),
    )
    return replace(FAMILIES["qwen3_moe"], read=read_mixed, layer=layer)


@contextmanager
def planted(family: Family) -> Iterator[None]:
    """Let ``family`` replace the one of its ``model_type`` inside this context."""
    families.layers_are_alike.cache_clear()
    with patch.dict(FAMILIES, {family.model_type: family}):
        yield
    families.layers_are_alike.cache_clear()
