"""Read 8-bit and 4-bit weights with their scales as fp32, and write 8-bit weights.

A matrix of type F8_E4M3 (``quantization_config: {quant_method: fp8}``) has a tensor ``..._scale_inv``: a factor for
each block of ``weight_block_size`` (rows, columns), or one factor for the whole matrix.

A checkpoint has two tensors of bytes in place of an MXFP4 matrix [rows, columns] (``quant_method: mxfp4``). In
``..._blocks`` [rows, columns / 32, 16], each byte has two elements; the low bits have the first element. ``..._scales``
[rows, columns / 32] has the exponents of the blocks' factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_dppo import block_fp8
from megatron_dppo.checkpoint_conversion.hf_folder import (
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SafetensorsReader,
    ShardedWriter,
)
from megatron_dppo.checkpoint_conversion.tensor_store import (
    TensorSpec,
    TensorStore,
    check_tensors,
    check_tied_copy,
)
from megatron_dppo.checkpoint_conversion.torch_dist import open_source
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_stored_shape
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.quantization import (
    SCALE_SUFFIX,
    SCHEME,
    check_block_widths,
    is_quantized,
    stored_tensors,
)
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DequantizedReader(Closing):
    """The tensors of a folder with 8-bit weights. ``specs`` has the stored types; 8-bit rows are returned as fp32.

    ``block``: config.json's ``weight_block_size``; None if the key is missing. Raises CheckpointError if an 8-bit
    tensor is no matrix, has no scales, has scales that are no floating-point numbers of 16 or 32 bits, or has scales
    whose shape does not fit its blocks.
    """

    def __init__(self, reader: SafetensorsReader, block: tuple[int, int] | None) -> None:
        self.folder = reader.folder
        self._reader = reader
        self.specs = {
            name: s for name, s in reader.specs.items() if not name.endswith(SCALE_SUFFIX)
        }
        self._blocks: dict[str, tuple[int, ...]] = {}
        for name, spec in self.specs.items():
            if spec.dtype == block_fp8.DTYPE:
                self._blocks[name] = self._checked_block(name, spec, block)

    def _checked_block(
        self, name: str, spec: TensorSpec, block: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the rows and columns that share a scale in an 8-bit matrix. Raises CheckpointError."""
        scale = self._reader.specs.get(name + SCALE_SUFFIX)
        if scale is None or len(spec.shape) != 2:
            raise CheckpointError(
                f"{self.folder}: {name} of shape {spec.shape} has 8-bit weights, expected a matrix with "
                f"{name}{SCALE_SUFFIX}"
            )
        if scale.dtype not in _SCALE_DTYPES:
            raise CheckpointError(
                f"{self.folder}: {name}{SCALE_SUFFIX} has the type {str(scale.dtype).removeprefix('torch.')}, expected "
                "float32, bfloat16 or float16: exponents that are stored as bytes (UE8M0) are not read"
            )
        if math.prod(scale.shape) == 1:
            return spec.shape[0], spec.shape[1]
        if block is None:
            raise CheckpointError(
                f"{self.folder}: {name}{SCALE_SUFFIX} has shape {scale.shape}, and config.json's quantization_config "
                "has no weight_block_size"
            )
        grid = tuple(math.ceil(n / length) for n, length in zip(spec.shape, block, strict=True))
        if scale.shape != grid:
            raise CheckpointError(
                f"{self.folder}: {name}{SCALE_SUFFIX} has shape {scale.shape}, expected {grid} for blocks of {block}"
            )
        return block

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of dim 0."""
        rows = self._reader.read_rows(name, start, count)
        if name not in self._blocks:
            return rows
        height, width = self._blocks[name]
        scale_start = start // height
        scale_end = math.ceil((start + count) / height)
        scale_count = scale_end - scale_start
        scales = self._reader.read_rows(name + SCALE_SUFFIX, scale_start, scale_count).float()
        # Repeat each block's scale for all its rows, keep the scales of the rows that were read, then repeat each scale
        # for all columns of its block.
        row_scales = scales.reshape(scale_count, -1).repeat_interleave(height, 0)
        row_scales = row_scales[start - scale_start * height :][:count]
        element_scales = row_scales.repeat_interleave(width, 1)[:, : rows.shape[1]]
        return rows.float() * element_scales

    def close(self) -> None:
        self._reader.close()


_MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The values of E2M1 by their lower three bits; the fourth bit is the sign."""
_MXFP4_BIAS = 127
_MXFP4_BLOCK = 32
"""Number of elements in a row that share one exponent."""


def mxfp4_values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Compute the elements of MXFP4: value(4 bits) * 2^(scale - 127), fp32 [..., groups * 32].

    ``blocks`` is uint8 [..., groups, 16], ``scales`` uint8 [..., groups].
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = torch.cat([_MXFP4_VALUES, -_MXFP4_VALUES])[codes.int()]
    exponents = scales.int() - _MXFP4_BIAS
    return torch.ldexp(values, exponents[..., None]).flatten(-2)


class Mxfp4Reader(Closing):
    """The tensors of a folder with matrices in MXFP4. ``specs`` has uint8 as the type of these matrices; their rows are
    returned as fp32.

    Raises CheckpointError if one of a matrix's two tensors is missing, or if the shapes of the two do not fit.
    """

    def __init__(self, reader: SafetensorsReader) -> None:
        self.folder = reader.folder
        self._reader = reader
        self._quantized: set[str] = set()
        self.specs: dict[str, TensorSpec] = {}
        for name, spec in reader.specs.items():
            if name.endswith(MXFP4_BLOCKS):
                matrix = name.removesuffix(MXFP4_BLOCKS)
                self.specs[matrix] = self._matrix(matrix, spec)
                self._quantized.add(matrix)
            elif not name.endswith(MXFP4_SCALES):
                self.specs[name] = spec

    def _matrix(self, name: str, blocks: TensorSpec) -> TensorSpec:
        scales = self._reader.specs.get(name + MXFP4_SCALES)
        is_of_bytes = scales is not None and blocks.dtype == scales.dtype == torch.uint8
        if scales is None or not is_of_bytes or blocks.shape != (*scales.shape, _MXFP4_BLOCK // 2):
            found = "none" if scales is None else f"{scales.dtype} of shape {scales.shape}"
            raise CheckpointError(
                f"{self.folder}: {name}{MXFP4_BLOCKS} is {blocks.dtype} of shape {blocks.shape} and "
                f"{name}{MXFP4_SCALES} is {found}, expected bytes of shapes [rows, groups, {_MXFP4_BLOCK // 2}] and "
                "[rows, groups]"
            )
        rows, groups = scales.shape
        return TensorSpec((rows, groups * _MXFP4_BLOCK), torch.uint8)

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of dim 0."""
        if name not in self._quantized:
            return self._reader.read_rows(name, start, count)
        blocks = self._reader.read_rows(name + MXFP4_BLOCKS, start, count)
        return mxfp4_values(blocks, self._reader.read_rows(name + MXFP4_SCALES, start, count))

    def close(self) -> None:
        self._reader.close()


def open_weights(hf_dir: str | Path) -> SafetensorsReader | DequantizedReader | Mxfp4Reader:
    """Open a Hugging Face folder with a supported config.json, with or without weights of 8 or 4 bits. Raises
    CheckpointError.
    """
    reader = SafetensorsReader(hf_dir)
    if any(name.endswith(MXFP4_BLOCKS) for name in reader.specs):
        try:
            return Mxfp4Reader(reader)
        except CheckpointError:
            reader.close()
            raise
    if all(spec.dtype != block_fp8.DTYPE for spec in reader.specs.values()):
        return reader
    try:
        return DequantizedReader(reader, _block_size(reader.folder / "config.json"))
    except CheckpointError:
        reader.close()
        raise


@contextmanager
def open_model(hf_dir: str | Path) -> Iterator[tuple[ModelShape, TensorStore]]:
    """Open a Hugging Face folder, with or without weights of 8 or 4 bits; yield the model's shape and its tensors.

    Raises ModelError unless the tensors are those of config.json.
    """
    shape = load_stored_shape(hf_dir)
    with open_weights(hf_dir) as reader:
        check_tensors(reader.specs, shape, str(hf_dir))
        check_tied_copy(reader, shape, str(hf_dir))
        yield shape, reader


def _block_size(path: Path) -> tuple[int, int] | None:
    scheme = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    size = scheme.get("weight_block_size")
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2
    if not is_pair or not all(type(length) is int and length > 0 for length in size):
        raise CheckpointError(
            f"{path}: quantization_config.weight_block_size is {size!r}, expected two positive integers"
        )
    return size[0], size[1]


def quantize_folder(
    hf_dir: str | Path, out_dir: str | Path, progress: Callable[[int], None]
) -> dict[str, TensorSpec]:
    """Write the Hugging Face folder ``hf_dir`` as a folder with block-FP8 weights; return the tensors written.

    An engine with ``engine.quantization: fp8`` receives exactly these tensors. ``progress`` is called with the bytes
    that were read. Raises CheckpointError, MismatchError if a tensor differs from the folder's certificate, and
    LayoutError if a matrix has a width that is no multiple of 128.
    """
    with open_source(hf_dir) as (shape, reader):
        check_block_widths(shape, EngineLayout())
        specs: dict[str, TensorSpec] = {}
        for name, dims in stored_tensors(hf_tensors(shape)).items():
            if name not in reader.specs:
                # A tensor of scales.
                dtype = torch.float32
            elif is_quantized(name):
                dtype = block_fp8.DTYPE
            else:
                dtype = reader.specs[name].dtype
            specs[name] = TensorSpec(dims, dtype)
        with ShardedWriter(out_dir, specs, side_files_from=hf_dir, quantization=SCHEME) as writer:
            for name, dims in hf_tensors(shape).items():
                rows = reader.read_rows(name, 0, dims[0])
                for stored_name, tensor in block_fp8.encode(name, rows):
                    writer.write_rows(stored_name, 0, tensor)
                progress(rows.nbytes)
    return specs
