"""Faulty weight updates of each family: the verification names exactly the engine's tensors that are wrong.

The engine's checksums are those of the weights that it would hold after the fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import FAMILIES, load_model_shape
from megatron_dppo.model.mapping import engine_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.weights.verification import compare_checksums
from tests.engine_digests import expected_digests, random_weights
from tests.tiny_models import R1_FORM, save_tiny_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "R1's form": ("deepseek_v3", R1_FORM),
}
FLOAT32 = ("e_score_correction_bias", "expert_bias", "linear_attn.norm.weight")
"""Ends of the names of tensors that the trainer sends in float32."""
Sources = dict[str, frozenset[str]]
"""Names of an engine's tensors -> names of the Hugging Face tensors that each is made of."""


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelShape, dict[str, Tensor], Sources]:
    """The shape of a tiny model of three layers, random weights of it, and the sources of the engine's tensors."""
    family, options = CASES[request.param]
    folder: Path = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, family, layers=3, dtype=torch.bfloat16, **options)
    shape = load_model_shape(folder)
    source_names: dict[str, set[str]] = {}
    for parameter in engine_parameters(shape, EngineLayout(1), 0):
        # The experts of a layer are one tensor of the engine.
        name = parameter.name.partition("[")[0]
        source_names.setdefault(name, set()).update(s.hf_name for s in parameter.segments)
    sources = {name: frozenset(names) for name, names in source_names.items()}
    return shape, random_weights(shape, float32_ends=FLOAT32), sources


def tensors_made_of(changed: set[str], sources: Sources) -> set[str]:
    return {name for name, names in sources.items() if names & changed}


def mismatched_tensors(
    shape: ModelShape, sent: dict[str, Tensor], held: dict[str, Tensor]
) -> set[str]:
    """Return the tensors that the verification names if the engine holds ``held`` after ``sent`` was sent."""
    expected, actual = expected_digests(shape, sent), expected_digests(shape, held)
    return {mismatch.tensor for mismatch in compare_checksums(expected, actual)}


def name_in_layer(name: str, layer: int) -> str | None:
    """Return the part of a Hugging Face name after the number of ``layer``; None for a name outside this layer."""
    _, found, rest = name.partition(f".layers.{layer}.")
    return rest if found else None


def test_a_stale_source_is_named_by_the_tensors_that_are_made_of_it(case) -> None:
    shape, weights, sources = case
    stale = random_weights(shape, seed=1, float32_ends=FLOAT32)
    for layer in (0, 2):
        # Layers 0 and 2 are of different kinds: dense and routed, or with a delta net and with attention. Only expert 1
        # is tested.
        own = [name for name in weights if name_in_layer(name, layer) is not None]
        for name in own:
            if ".experts." in name and ".experts.1." not in name:
                continue
            held = {**weights, name: stale[name]}
            expected = tensors_made_of({name}, sources)
            assert expected, name
            assert mismatched_tensors(shape, weights, held) == expected


def test_rows_of_another_layer_are_named(case) -> None:
    shape, weights, sources = case
    changed = {}
    for name in weights:
        for layer in (1, 2):
            other = name.replace(f".layers.{layer}.", f".layers.{layer - 1}.")
            if other != name and other in weights:
                changed[name] = weights[other]
    assert len(changed) >= 8
    expected = tensors_made_of(set(changed), sources)
    assert mismatched_tensors(shape, weights, {**weights, **changed}) == expected


def test_sources_of_a_fused_tensor_in_each_others_place_are_named(case) -> None:
    shape, weights, sources = case
    swapped = 0
    for name, names in sources.items():
        if name_in_layer(name, 2) is None:
            continue
        by_shape: dict[torch.Size, str] = {}
        for source in sorted(names):
            first = by_shape.setdefault(weights[source].shape, source)
            if first == source:
                continue
            held = {**weights, first: weights[source], source: weights[first]}
            assert name in mismatched_tensors(shape, weights, held)
            swapped += 1
            break
    assert swapped >= 2
