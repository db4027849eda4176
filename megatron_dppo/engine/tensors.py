"""An SGLang server's tensors, part by part: the bytes that its checksums are taken over.

``model.mapping`` says which blocks of which Hugging Face tensors each engine rank holds. Here the
blocks are put in the order in which they lie in the engine's memory, experts one after another, and end in zeros where
the engine pads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_dppo.model.layout import EngineLayout
from megatron_dppo.model.mapping import LocalParameter, Segment, engine_parameters, hf_tensors
from megatron_dppo.model.shape import ModelShape

EXPERT_MULTIPLE = {"cpu": 32, "cuda": 1}
"""A rank's share of an expert's intermediate dimension is padded with zeros to a multiple."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A part of ``tensor`` on engine ``rank``, from element ``start`` on: a block of a Hugging Face tensor.

    Zeros follow it up to ``width`` along the block's dimension.
    """

    rank: int
    tensor: str
    start: int
    block: Segment
    width: int

    def cut(self, hf_tensor: Tensor) -> Tensor:
        """The part, out of the whole Hugging Face tensor; a view where nothing is padded."""
        held = self.block.of_hf(hf_tensor)
        missing = self.width - self.block.length
        if missing == 0:
            return held
        return F.pad(held, (*(0, 0) * (held.dim() - 1 - self.block.dim), 0, missing))


class EngineTensors:
    """A served model on ``ranks`` tensor-parallel ranks of a "cpu" or "cuda" engine.

    ``parts``: the places of each Hugging Face tensor. ``sizes``: for each rank, the elements of each
    engine tensor; those that no part fills hold zeros, as the last rank's share of a small
    vocabulary. Raises LayoutError where the ranks don't divide the model.
    """

    def __init__(self, shape: ModelShape, ranks: int = 1, device: str = "cuda") -> None:
        self.shape, self.ranks, self.device = shape, ranks, device
        self.parts: dict[str, list[EnginePart]] = {name: [] for name in hf_tensors(shape)}
        self.sizes: list[dict[str, int]] = [{} for _ in range(ranks)]
        for rank in range(ranks):
            for parameter in engine_parameters(shape, EngineLayout(ranks), rank):
                self._add(rank, parameter)

    def _add(self, rank: int, parameter: LocalParameter) -> None:
        tensor, is_expert, _ = parameter.name.partition("[")
        sizes = self.sizes[rank]
        if not parameter.segments:
            sizes[tensor] = sizes.get(tensor, 0) + math.prod(parameter.shape)
        multiple = EXPERT_MULTIPLE[self.device] if is_expert else 1
        for block, end in _with_ends(parameter):
            start = sizes.get(tensor, 0)
            width = -(-(end - block.local_start) // multiple) * multiple
            row = math.prod(parameter.shape) // parameter.shape[block.dim]
            sizes[tensor] = start + width * row
            self.parts[block.hf_name].append(EnginePart(rank, tensor, start, block, width))


def _with_ends(parameter: LocalParameter) -> list[tuple[Segment, int]]:
    """Blocks in the order of their places, each with the next one's: padding belongs to the block before it."""
    blocks = sorted(parameter.segments, key=lambda block: block.local_start)
    ends = [block.local_start for block in blocks[1:]]
    return list(zip(blocks, [*ends, *(parameter.shape[b.dim] for b in blocks[-1:])], strict=True))
