"""Round the trainer's matrices to block FP8, as an engine does, for the comparison after a weight update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor

from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import LocalParameter, Segment, local_parameters
from megatron_dppo.model.quantization import BLOCK, is_quantized
from megatron_dppo.model.shape import ModelShape


@contextmanager
@torch.no_grad()
def rounded_to_fp8(
    values: Mapping[ParameterKey, Tensor],
    shape: ModelShape,
    layout: Layout,
    rank: int,
) -> Iterator[None]:
    """Inside this context, quantise and dequantise the matrices among this rank's ``values`` in place. Not collective.

    The original values are copied to the host, and restored bit for bit on leaving the context. If this rank's part of
    a matrix begins or ends inside of an FP8 block, the part stays unchanged, because the block's scale depends on other
    ranks too.
    """
    originals: list[tuple[Tensor, Tensor]] = []
    try:
        for parameter in local_parameters(shape, layout, rank):
            parts = _whole_blocks(parameter)
            if not parts:
                continue
            tensor = values[parameter.chunk, parameter.name]
            originals.append((tensor, tensor.to("cpu", copy=True)))
            for segments in parts:
                _round(tensor, segments)
        yield
    finally:
        for tensor, original in originals:
            tensor.copy_(original)


def _whole_blocks(parameter: LocalParameter) -> list[list[Segment]]:
    """Return a list of segments, in order, for each quantised matrix of which this rank has only whole blocks.

    Ranks divide a matrix along one axis. Each segment has all of the other axis, so only the divided axis is checked.
    """
    by_matrix: dict[str, list[Segment]] = defaultdict(list)
    for segment in parameter.segments:
        if is_quantized(segment.hf_name):
            by_matrix[segment.hf_name].append(segment)
    parts: list[list[Segment]] = []
    for segments in by_matrix.values():
        segments.sort(key=attrgetter("hf_start"))
        starts = [segment.hf_start for segment in segments]
        ends = [segment.hf_start + segment.length for segment in segments]
        is_contiguous = starts[1:] == ends[:-1]
        has_whole_blocks = starts[0] % BLOCK == 0 and ends[-1] % BLOCK == 0
        if is_contiguous and has_whole_blocks:
            parts.append(segments)
    return parts


def _round(tensor: Tensor, segments: list[Segment]) -> None:
    """Quantise and dequantise, in place, the ``segments`` of a matrix in this rank's ``tensor``."""
    dim = segments[0].dim
    matrix = torch.cat([segment.of_local(tensor) for segment in segments], dim)
    rounded = dequantize(*quantize(matrix), dtype=tensor.dtype)
    start = 0
    for segment in segments:
        segment.of_local(tensor).copy_(rounded.narrow(dim, start, segment.length))
        start += segment.length
