"""What the engine's checksums must be, from the very Hugging Face tensors that the trainer holds; bucket by bucket, in
any order, by as many ranks as send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, dtype, zeros

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.engine.tiled_hash import WORD, Part, TiledHash, add_parts
from megatron_dppo.model import mapping
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
    block: mapping.Segment
    width: int

    def cut(self, hf_tensor: Tensor) -> Tensor:
        """The part, out of the whole Hugging Face tensor; a view where nothing is padded."""
        cut = self.block.of_hf(hf_tensor)
        missing = self.width - self.block.length
        if missing == 0:
            return cut
        return F.pad(cut, (*(0, 0) * (cut.dim() - 1 - self.block.dim), 0, missing))


class EngineTensors:
    """A served model on ``ranks`` tensor-parallel ranks of a "cpu" or "cuda" engine: the bytes that its checksums
    are taken over.

    ``parts``: the places of each Hugging Face tensor. ``sizes``: for each rank, the elements of each
    engine tensor; those that no part fills hold zeros, as the last rank's share of a small
    vocabulary. Raises LayoutError where the ranks don't divide the model.
    """

    def __init__(self, shape: ModelShape, ranks: int = 1, device: str = "cuda") -> None:
        self.shape, self.ranks, self.device = shape, ranks, device
        self.parts: dict[str, list[EnginePart]] = {name: [] for name in mapping.hf_tensors(shape)}
        self.sizes: list[dict[str, int]] = [{} for _ in range(ranks)]
        for rank in range(ranks):
            for parameter in mapping.engine_parameters(shape, mapping.EngineLayout(ranks), rank):
                self._add(rank, parameter)

    def _add(self, rank: int, parameter: mapping.LocalParameter) -> None:
        # Blocks lie in the engine's memory one after another, experts too, and end in zeros where the engine pads.
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


def _with_ends(parameter: mapping.LocalParameter) -> list[tuple[mapping.Segment, int]]:
    """Blocks in the order of their places, each with the next one's: padding belongs to the block before it."""
    blocks = sorted(parameter.segments, key=lambda block: block.local_start)
    ends = [block.local_start for block in blocks[1:]]
    return list(zip(blocks, [*ends, *(parameter.shape[b.dim] for b in blocks[-1:])], strict=True))


class IncompleteWeightsError(EngineError, ValueError):
    """The streams of buckets left out, repeated or misshaped a tensor of the model."""

    attempts = 1


class ExpectedChecksums:
    """Checksums of the Hugging Face tensors that one rank sends, as the engine will compute them.

    An engine tensor that several ranks fill (experts of several expert-parallel ranks) is hashed in parts: ``partial``
    goes to the rank that compares, and ``digests`` puts all together. ``weights_dtype``: of every weight. Raises
    IncompleteWeightsError where a part of the model does not begin at a whole 32-bit word.
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: dtype) -> None:
        self._tensors = tensors
        self._dtype = weights_dtype
        self._shapes = mapping.hf_tensors(tensors.shape)
        self._seen: set[str] = set()
        self._hashes: dict[tuple[int, str], TiledHash] = {}
        self._unfinished: list[Callable[[], None]] = []
        odd = [n for n, ps in tensors.parts.items() if any(self._byte(p) % WORD for p in ps)]
        if odd:
            raise IncompleteWeightsError(
                f"weight update: {odd[0]} lies at an odd place in the engine's memory; checksums "
                f"need parts that begin at multiples of {WORD} bytes"
            )

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Start to hash the next bucket, all its parts by one kernel; on a GPU nobody waits for it before ``partial``.

        Raises IncompleteWeightsError for an unknown, repeated or misshaped tensor.
        """
        parts: list[Part] = []
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                whole = self._hash(part.rank, part.tensor)
                parts.append((whole, part.cut(tensor), self._byte(part)))
        self._unfinished.append(add_parts(parts))

    def partial(self) -> Any:
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()
        sums = [[rank, name, h.state()] for (rank, name), h in self._hashes.items()]
        return [sorted(self._seen), sums]

    def digests(self, partials: Sequence[Any]) -> list[dict[str, str]]:
        """Checksum by engine tensor, for each engine rank, of what all ranks together took.

        Raises IncompleteWeightsError naming what never came, or came from two ranks.
        """
        self._check_complete([name for names, _ in partials for name in names])
        whole = {
            (rank, name): TiledHash(elements * self._dtype.itemsize)
            for rank, sizes in enumerate(self._tensors.sizes)
            for name, elements in sizes.items()
        }
        for _, sums in partials:
            for rank, name, state in sums:
                whole[rank, name].merge(state)
        for rank, name in whole.keys() - {(r, n) for _, sums in partials for r, n, _ in sums}:
            elements = self._tensors.sizes[rank][name]
            # What no tensor fills is padding, which the engine hashes all the same.
            whole[rank, name].add(zeros(elements, dtype=self._dtype), 0)
        return [
            {name: whole[rank, name].hexdigest() for name in sizes}
            for rank, sizes in enumerate(self._tensors.sizes)
        ]

    def _check_complete(self, names: list[str]) -> None:
        missing = sorted(self._shapes.keys() - set(names))
        if missing:
            raise IncompleteWeightsError(
                f"weight update: {len(missing)} tensors were never sent: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}"
            )
        if len(names) > len(self._shapes):
            twice = next(name for name in names if names.count(name) > 1)
            raise IncompleteWeightsError(f"weight update: {twice} came from two ranks")

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None or name in self._seen:
            raise IncompleteWeightsError(
                f"weight update: {name} came twice or is no tensor of this model"
            )
        self._seen.add(name)
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise IncompleteWeightsError(
                f"weight update: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(shape)} {self._dtype}"
            )

    def _hash(self, rank: int, tensor: str) -> TiledHash:
        key = (rank, tensor)
        if key not in self._hashes:
            size = self._tensors.sizes[rank][tensor] * self._dtype.itemsize
            self._hashes[key] = TiledHash(size)
        return self._hashes[key]

    def _byte(self, part: EnginePart) -> int:
        return part.start * self._dtype.itemsize
