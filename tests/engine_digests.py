"""Random weights of a model, and the checksums that an engine with them must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums
from megatron_dppo.weights.verification import compare_checksums

Fault = tuple[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor]]
"""A fault of an engine: the tensor's name, and its wrong value by the engine's tensor and the Hugging Face tensors."""


def random_weights(
    shape: ModelShape, seed: int = 0, *, float32_ends: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Return all Hugging Face tensors, in bfloat16 except those whose names end with one of ``float32_ends``."""
    torch.manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, size in hf_tensors(shape).items():
        values = torch.randn(size)
        weights[name] = values if name.endswith(float32_ends) else values.bfloat16()
    return weights


def expected_digests(
    shape: ModelShape, weights: Mapping[str, Tensor], ranks: int = 1
) -> list[dict[str, str]]:
    """Return the checksums of each rank of a bfloat16 engine, by the name of SGLang's tensor."""
    checksums = ExpectedChecksums(EngineTensors(shape, EngineLayout(ranks)), torch.bfloat16)
    checksums.add(weights.items())
    return checksums.digests([checksums.partial()])


def mismatched_tensors(
    shape: ModelShape, weights: Mapping[str, Tensor], held: Mapping[str, Tensor]
) -> list[str]:
    """Return the names in ``held`` of an engine with one rank whose tensors are not those of ``weights``.

    The engine holds its other tensors as it must.
    """
    (expected,) = expected_digests(shape, weights)
    actual = expected | {name: tiled_hash(tensor) for name, tensor in held.items()}
    return [mismatch.tensor for mismatch in compare_checksums([expected], [actual])]
