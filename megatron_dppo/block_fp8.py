"""Quantisation of matrices to block FP8: e4m3 values, with one fp32 scale for each block of 128 x 128 elements.

Values and scales have the layout of a serialised checkpoint (``quantization_config: {quant_method: fp8,
weight_block_size: [128, 128]}``): ``weight`` of shape ``[n, k]``, and ``weight_scale_inv`` of shape
``[ceil(n / 128), ceil(k / 128)]``, with weight = value * scale. Blocks at the lower and right edge may be smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dppo.model.quantization import BLOCK, SCALE_SUFFIX, is_quantized, scale_dims

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
"""448, the largest value of e4m3."""
_CHECKSUM_ROWS = 64 * BLOCK
"""Rows that ``block_checksums`` handles at a time. Its products take as much memory as the rows themselves."""
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_SMALLEST_ACTIVATION = 1e-10
"""SGLang's lower bound of the largest magnitude in a block of activations, so that no scale is 0."""


class BlockFp8(NamedTuple):
    """Quantised values (e4m3), and their scales (fp32)."""

    values: Tensor
    scales: Tensor


def quantize(weight: Tensor, scale_factor: float = 1.0) -> BlockFp8:
    """Quantise ``weight`` ``[n, k]``: a block's largest magnitude becomes 448, or 448 / ``scale_factor``.

    The scale is fp32(amax / 448), at least the smallest normal number, and 1 for a block of zeros. A value is
    e4m3(fp32(w / scale)), rounded to nearest even. A NaN makes the scale and all values of its block NaN. An infinity
    makes the block's scale infinite, its own value NaN, and the block's other values 0.
    """
    n, k = weight.shape
    blocks = _blocks(weight.float())
    scales = scales_of(blocks.abs().amax(dim=(1, 3)), scale_factor)
    values = rounded(blocks, scales[:, None, :, None])
    padded_values = values.reshape(values.shape[0] * BLOCK, values.shape[2] * BLOCK)
    return BlockFp8(padded_values[:n, :k].contiguous(), scales)


def scales_of(amax: Tensor, scale_factor: float = 1.0) -> Tensor:
    """Return the scales of blocks with the largest magnitudes ``amax`` (fp32, any shape); see ``quantize``."""
    scales = (amax / LARGEST * scale_factor).clamp_min(_SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, scales)


def rounded(weight: Tensor, scales: Tensor) -> Tensor:
    """Return e4m3(weight / scale), fp32 ``weight``, with ``scales`` that broadcast to its shape; see ``quantize``."""
    return (weight / scales).clamp_(-LARGEST, LARGEST).to(DTYPE)


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return value * scale of a matrix, computed in fp32 and rounded to ``dtype``.

    Raises ValueError if ``scales`` does not have one element for each block of ``values``.
    """
    n, k = values.shape
    grid = scale_dims((n, k))
    if tuple(scales.shape) != grid:
        raise ValueError(
            f"block FP8: scales have shape {tuple(scales.shape)}, expected {grid} for a matrix of shape {(n, k)}"
        )
    row_scales = scales.float().repeat_interleave(BLOCK, 0)[:n]
    element_scales = row_scales.repeat_interleave(BLOCK, 1)[:, :k]
    return (values.float() * element_scales).to(dtype)


def encode(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return the names and tensors that a block-FP8 checkpoint has for the Hugging Face tensor ``name``.

    A matrix that the scheme quantises becomes two tensors, its values and its scales; any other tensor is returned
    unchanged.
    """
    if not is_quantized(name):
        return [(name, tensor)]
    values, scales = quantize(tensor)
    return [(name, values), (name + SCALE_SUFFIX, scales)]


def block_checksums(values: Tensor) -> Tensor:
    """Return a checksum of the bytes of each block of e4m3 ``values`` ``[n, k]``.

    The checksums are int64 ``[ceil(n / 128), ceil(k / 128)]``. A checksum is the sum, modulo 2^64, of the block's
    8-byte words times fixed odd numbers. Blocks at the edges are filled up with zeros.
    """
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (BLOCK, 1, BLOCK // 8), generator=generator)
    factors = (2 * factors + 1).to(values.device)
    sums: list[Tensor] = []
    for part in values.view(torch.uint8).split(_CHECKSUM_ROWS):
        n, k = part.shape
        rows, columns = scale_dims((n, k))
        padding = (0, columns * BLOCK - k, 0, rows * BLOCK - n)
        words = torch.nn.functional.pad(part, padding).view(torch.int64)
        products = words.view(rows, BLOCK, columns, BLOCK // 8) * factors
        sums.append(products.sum(dim=(1, 3)))
    return torch.cat(sums)


def round_activations(x: Tensor) -> Tensor:
    """Return ``x`` ``[..., k]`` in fp32 as a W8A8 kernel reads it: quantised in blocks of 1 x 128, and dequantised.

    The arithmetic is that of SGLang's ``_per_token_group_quant_8bit``. Raises ValueError if k is no multiple of 128.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(
            f"block FP8: activations have width {x.shape[-1]}, expected a multiple of {BLOCK}"
        )
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST_ACTIVATION) / LARGEST
    values = (groups * (1.0 / scales)).clamp(-LARGEST, LARGEST).to(DTYPE)
    return (values.float() * scales).flatten(-2)


def _blocks(matrix: Tensor) -> Tensor:
    """Return the blocks ``[ceil(n / 128), 128, ceil(k / 128), 128]`` of a matrix, padded with zeros at its edges."""
    n, k = matrix.shape
    rows, columns = scale_dims((n, k))
    padding = (0, columns * BLOCK - k, 0, rows * BLOCK - n)
    padded = torch.nn.functional.pad(matrix, padding)
    return padded.reshape(rows, BLOCK, columns, BLOCK)
