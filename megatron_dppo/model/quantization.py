"""Block-FP8 weights in an engine: the tensors that are quantised, and the names and shapes of their scales.

SGLang quantises the linear layers and the experts. Embeddings, norms, biases, the output matrix, routers and the gates
of shared experts keep the dtype of the model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.mapping import EngineParameter, LocalParameter, Segment, engine_parameters
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.splits import Dims

BLOCK = 128
"""A block of a weight has this number of rows and of columns, and one scale. A block of activations has one row and
this number of columns."""
SCALE_BYTES = 4
SCALE_SUFFIX = "_scale_inv"
"""Ending of the name of a weight's scales, in checkpoints and in engines."""
Rounding = Literal["fp8", "fp8_twice", "fp8_scaled"]
"""How the trainer's weights are rounded to block FP8 when it scores the canary: as in engines; once more, with other
scales; or as in engines and multiplied by SCALED_BY."""
SCALED_BY = 1.05
SCHEME: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""``quantization_config`` of a config.json."""
_MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""Endings of the names of quantised tensors; w1, w2 and w3 are Mixtral's experts."""


def is_quantized(hf_name: str) -> bool:
    """Return whether an engine with block-FP8 weights holds the Hugging Face tensor ``hf_name`` in FP8."""
    return hf_name.endswith(_MATRICES)


def scale_dims(dims: Dims) -> Dims:
    """Return the shape of the scales of a matrix of the shape ``dims``."""
    return tuple(-(-size // BLOCK) for size in dims)


def stored_bytes(hf_name: str, dims: Dims, item_bytes: int, *, quantized: bool) -> int:
    """Return the bytes that an engine receives for a tensor. A ``quantized`` engine receives an FP8 tensor and its
    scales for each tensor of ``is_quantized``."""
    elements = math.prod(dims)
    if quantized and is_quantized(hf_name):
        return elements + SCALE_BYTES * math.prod(scale_dims(dims))
    return elements * item_bytes


def stored_tensors(tensors: dict[str, Dims]) -> dict[str, Dims]:
    """Return the tensors of a block-FP8 checkpoint: ``tensors`` in their order, each quantised tensor followed by its
    scales."""
    stored: dict[str, Dims] = {}
    for name, dims in tensors.items():
        stored[name] = dims
        if is_quantized(name):
            stored[name + SCALE_SUFFIX] = scale_dims(dims)
    return stored


def holds_quantized(parameter: LocalParameter) -> bool:
    """Return whether an engine with block-FP8 weights holds ``parameter`` in FP8."""
    return any(is_quantized(segment.hf_name) for segment in parameter.segments)


def scale_parameter(parameter: EngineParameter) -> EngineParameter:
    """Return the engine's parameter that holds the scales of ``parameter``.

    No block of ``parameter`` may span two segments.
    """
    # An expert's name ends with its number: ``tensor[3]``.
    tensor, bracket, expert = parameter.name.partition("[")
    segments: list[Segment] = []
    for segment in parameter.segments:
        segments.append(
            replace(
                segment,
                hf_name=segment.hf_name + SCALE_SUFFIX,
                hf_start=segment.hf_start // BLOCK,
                local_start=segment.local_start // BLOCK,
                length=-(-segment.length // BLOCK),
            )
        )
    return replace(
        parameter,
        name=f"{tensor}{SCALE_SUFFIX}{bracket}{expert}",
        shape=scale_dims(parameter.shape),
        segments=tuple(segments),
    )


def check_block_widths(shape: ModelShape, engine: EngineLayout) -> None:
    """Raise LayoutError if a rank's share of a quantised matrix has a dimension that is no multiple of 128.

    SGLang's kernels read activations in groups of 128 columns, and each part of a fused matrix must have whole blocks.
    """
    # All ranks have shares of equal sizes, so the shares of the first rank are enough.
    first_rank = 0
    for parameter in engine_parameters(shape, engine, first_rank):
        if not holds_quantized(parameter):
            continue
        for segment in parameter.segments:
            dims = list(parameter.shape)
            dims[segment.dim] = segment.length
            if any(size % BLOCK for size in dims):
                raise LayoutError(
                    f"{segment.hf_name} has a share of {' x '.join(map(str, dims))} on each of {engine.tensor} engine "
                    f"ranks, expected multiples of {BLOCK} for block FP8 (sglang.tp_size)"
                )
