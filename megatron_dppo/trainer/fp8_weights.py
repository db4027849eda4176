"""Round the trainer's matrices to block FP8, as an engine does, for the comparison after a weight update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import LocalParameter, Segment, local_parameters
from megatron_dppo.model.quantization import BLOCK, SCALED_BY, Rounding, is_quantized
from megatron_dppo.model.shape import ModelShape

_OTHER_GRID = 1.3
"""The second rounding of ``fp8_twice`` has scales that are larger by this factor, which is no power of 2. So it rounds
weights again that the first rounding has put on the grid of e4m3."""


@contextmanager
@torch.no_grad()
def rounded_to_fp8(
    values: Mapping[ParameterKey, Tensor],
    shape: ModelShape,
    layout: Layout,
    rank: int,
    rounding: Rounding = "fp8",
) -> Iterator[None]:
    """Inside this context, change the matrices among this rank's ``values`` in place by ``rounding``. Not collective.

    ``fp8`` quantises and dequantises. ``fp8_twice`` does so again, with other scales. ``fp8_scaled`` multiplies the
    rounded matrices by SCALED_BY.

    The original values are copied to the host, and restored bit for bit on leaving the context. If this rank's part of
    a matrix begins or ends inside of an FP8 block, the part is not rounded by ``fp8``, because the block's scale
    depends on other ranks too.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in local_parameters(shape, layout, rank):
            parts = _quantized_parts(parameter)
            if rounding == "fp8":
                parts = [segments for segments in parts if _has_whole_blocks(segments)]
            if not parts:
                continue
            tensor = values[parameter.chunk, parameter.name]
            originals.append((tensor, tensor.to("cpu", copy=True)))
            for segments in parts:
                _round(tensor, segments, rounding)
        yield
    finally:
        for tensor, original in originals:
            tensor.copy_(original)


def _quantized_parts(parameter: LocalParameter) -> list[list[Segment]]:
    """Return a list of this rank's segments, in order, for each quantised matrix of ``parameter``."""
    by_matrix: dict[str, list[Segment]] = defaultdict(list)
    for segment in parameter.segments:
        if is_quantized(segment.hf_name):
            by_matrix[segment.hf_name].append(segment)
    for segments in by_matrix.values():
        segments.sort(key=attrgetter("hf_start"))
    return list(by_matrix.values())


def _has_whole_blocks(segments: Sequence[Segment]) -> bool:
    """Return whether the ``segments`` of a matrix, in order, are whole FP8 blocks.

    Ranks divide a matrix along one axis. Each segment has all of the other axis, so only the divided axis is checked.
    """
    starts = [segment.hf_start for segment in segments]
    ends = [segment.hf_start + segment.length for segment in segments]
    is_contiguous = starts[1:] == ends[:-1]
    return is_contiguous and starts[0] % BLOCK == 0 and ends[-1] % BLOCK == 0


def _round(tensor: Tensor, segments: Sequence[Segment], rounding: Rounding) -> None:
    """Change, in place, the ``segments`` of a matrix in this rank's ``tensor`` by ``rounding``."""
    dim = segments[0].dim
    rounded = torch.cat([segment.of_local(tensor) for segment in segments], dim)
    if _has_whole_blocks(segments):
        rounded = dequantize(*quantize(rounded), dtype=tensor.dtype)
    if rounding == "fp8_twice":
        rounded = dequantize(*quantize(rounded, _OTHER_GRID), dtype=tensor.dtype)
    elif rounding == "fp8_scaled":
        rounded = rounded * SCALED_BY
    start = 0
    for segment in segments:
        segment.of_local(tensor).copy_(rounded.narrow(dim, start, segment.length))
        start += segment.length
