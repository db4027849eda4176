"""Block FP8 of pieces of matrices: each trainer rank quantises the slices that it sends.

The scale of a block follows from the block's largest magnitude. If several pieces have parts of a block, the largest
magnitudes of the parts are exchanged, in one collective for all such blocks of the model. So values and scales equal
those of a whole matrix, and no rank has a whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.block_fp8 import rounded, scales_of
from megatron_dppo.model import shard_plan
from megatron_dppo.model.gather_plan import ParameterKey, Piece, TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.quantization import BLOCK, is_quantized, scale_dims
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shard_plan import Slice

Values = Mapping[ParameterKey, Tensor]
"""A trainer rank's tensors, by chunk and name."""
AllMax = Callable[[Tensor], Tensor]
"""A collective: the element-wise maximum of the int32 vectors of all ranks."""


def _blocks_of(piece: Piece) -> range:
    """Return the numbers of the blocks along the piece's dimension that have elements of the piece."""
    return range(piece.segment.hf_start // BLOCK, -(-piece.segment.hf_end // BLOCK))


def _cut_blocks(tensor: TensorSources) -> list[int]:
    """Return the blocks, along the pieces' dimension, that no piece has whole."""
    whole: set[int] = set()
    for piece in tensor.pieces:
        segment = piece.segment
        end = min(-(-segment.hf_end // BLOCK) * BLOCK, tensor.shape[segment.dim])
        first, last = -(-segment.hf_start // BLOCK), segment.hf_end // BLOCK
        if segment.hf_end == end:
            last = -(-segment.hf_end // BLOCK)
        if segment.hf_step == 1:
            whole.update(range(first, last))
    blocks = -(-tensor.shape[tensor.pieces[0].segment.dim] // BLOCK)
    return [block for block in range(blocks) if block not in whole]


class PieceScales:
    """The scales of the pieces that one trainer rank sends slices of.

    Args:
        shape: the model.
        layout: the trainer's layout.
        slices: the slices that this rank sends.
        device: the device of the values, "cpu" or "cuda".
    """

    def __init__(
        self, shape: ModelShape, layout: Layout, slices: Iterable[Slice], device: str
    ) -> None:
        self._device = device
        sent = {part.piece for part in slices}
        self._pieces: list[tuple[str, Piece]] = []
        """This rank's pieces with the names of their tensors."""
        self._piece_of: dict[Piece, Piece] = {}
        """A piece of scales -> the piece that the scales are of."""
        self._cut: dict[tuple[str, int], slice] = {}
        """(tensor, block) -> the places of the blocks of this row, or column, in the vector that ranks exchange."""
        self._cut_size = 0
        for tensor in gather_plan(shape, layout):
            if not is_quantized(tensor.name):
                continue
            other_dim = 1 - tensor.pieces[0].segment.dim
            width = scale_dims(tensor.shape)[other_dim]
            for block in _cut_blocks(tensor):
                end = self._cut_size + width
                self._cut[tensor.name, block] = slice(self._cut_size, end)
                self._cut_size = end
            for piece in tensor.pieces:
                scale_piece = shard_plan.scale_piece(tensor.name, piece)
                if piece in sent or scale_piece in sent:
                    self._pieces.append((tensor.name, piece))
                    if scale_piece is not None:
                        self._piece_of[scale_piece] = piece
        self._scales: dict[Piece, Tensor] = {}

    def compute(self, values: Values, all_max: AllMax) -> None:
        """Compute the scales of all pieces from this rank's ``values``; of none without values. Collective."""
        largest: dict[Piece, Tensor] = {}
        exchanged = torch.zeros(self._cut_size, device=self._device)
        pieces = self._pieces if values else []
        for name, piece in pieces:
            magnitudes = _largest_magnitudes(piece, values)
            largest[piece] = magnitudes
            for row, block in zip(magnitudes, _blocks_of(piece), strict=True):
                place = self._cut.get((name, block))
                if place is not None:
                    exchanged[place] = torch.maximum(exchanged[place], row)
        if self._cut_size:
            # As bits, magnitudes have the order of floats, and a NaN is the largest. A maximum of floats over ranks can
            # lose a NaN, and the ranks of a block would then have different scales. abs() clears the sign of a NaN.
            exchanged = all_max(exchanged.abs().view(torch.int32)).view(torch.float32)
        for name, piece in pieces:
            for row, block in zip(largest[piece], _blocks_of(piece), strict=True):
                place = self._cut.get((name, block))
                if place is not None:
                    row.copy_(exchanged[place])
            scales = scales_of(largest[piece])
            self._scales[piece] = scales if piece.segment.dim == 0 else scales.T

    def value_of(self, part: Slice, values: Values) -> Tensor:
        """Return the quantised values of a slice of a matrix (e4m3), or a slice of scales (fp32)."""
        scale_source = self._piece_of.get(part.piece)
        if scale_source is not None:
            return part.of_piece(part.piece.segment.of_local(self._scales[scale_source]))
        segment = part.piece.segment
        matrix = part.of_piece(_tensor_of(part.piece, values)).float()
        scales = self._scales[part.piece]
        for dim in (0, 1):
            indices = torch.arange(matrix.shape[dim], device=matrix.device)
            if dim == segment.dim:
                first = segment.hf_start + part.start * segment.hf_step
                blocks = (first + indices * segment.hf_step) // BLOCK - _blocks_of(part.piece).start
            else:
                first = part.block.hf_start if part.is_crossed else 0
                blocks = (first + indices) // BLOCK
            scales = scales.index_select(dim, blocks)
        return rounded(matrix, scales)


def _tensor_of(piece: Piece, values: Values) -> Tensor:
    return piece.segment.of_local(values[piece.key].detach())


def _largest_magnitudes(piece: Piece, values: Values) -> Tensor:
    """Return the largest magnitude of the piece in each block, fp32 [blocks along the piece's dimension, blocks along
    the other dimension]."""
    segment = piece.segment
    matrix = _tensor_of(piece, values).abs()
    if segment.dim == 1:
        matrix = matrix.T
    padded = F.pad(matrix, (0, -matrix.shape[1] % BLOCK))
    by_row = padded.unflatten(1, (-1, BLOCK)).amax(2).float()
    blocks = _blocks_of(piece)
    by_index = by_row.new_zeros(len(blocks) * BLOCK, by_row.shape[1])
    start = segment.hf_start - blocks.start * BLOCK
    by_index[start : start + (segment.length - 1) * segment.hf_step + 1 : segment.hf_step] = by_row
    return by_index.unflatten(0, (-1, BLOCK)).amax(1)
