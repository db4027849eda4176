"""The checksums that an engine must report, computed from the Hugging Face tensors that the trainer sends.

Tensors come in buckets, in any order, from one rank or several. ``megatron_dppo/tensor_hash`` has the hash itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor, dtype, zeros

from megatron_dppo.engine.errors import EngineError
from megatron_dppo.model import mapping
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import WORD, Part, TiledHash, add_parts

EXPERT_MULTIPLE = {"cpu": 32, "cuda": 1}
"""The multiple, by device, to which a rank's share of an expert's intermediate dimension is padded with zeros."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The place of one block of a Hugging Face tensor in the engine's memory.

    Attributes:
        rank: the engine rank that holds it.
        tensor: name of the engine tensor.
        start: first element in the engine tensor.
        block: the block of the Hugging Face tensor.
        width: length along the block's dimension in the engine; zeros fill it beyond the block.
    """

    rank: int
    tensor: str
    start: int
    block: mapping.Segment
    width: int

    def cut(self, hf_tensor: Tensor) -> Tensor:
        """Cut the part out of the whole Hugging Face tensor: a view, or a copy where zeros are added."""
        part = self.block.of_hf(hf_tensor)
        padding = self.width - self.block.length
        if padding == 0:
            return part
        return F.pad(part, (*(0, 0) * (part.dim() - 1 - self.block.dim), 0, padding))


class EngineTensors:
    """The tensors of a served model on ``ranks`` tensor-parallel ranks of a "cpu" or "cuda" engine.

    The engine's checksums cover exactly these bytes. Raises LayoutError if the model cannot be divided among the ranks.

    Attributes:
        parts: the places of each Hugging Face tensor, by its name.
        sizes: for each rank, the number of elements of each engine tensor. Elements that no part fills are zero, such
            as the last rank's share of a small vocabulary.
    """

    def __init__(self, shape: ModelShape, ranks: int = 1, device: str = "cuda") -> None:
        self.shape = shape
        self.ranks = ranks
        self.device = device
        self.parts: dict[str, list[EnginePart]] = {name: [] for name in mapping.hf_tensors(shape)}
        self.sizes: list[dict[str, int]] = [{} for _ in range(ranks)]
        for rank in range(ranks):
            for parameter in mapping.engine_parameters(shape, mapping.EngineLayout(ranks), rank):
                self._add(rank, parameter)

    def _add(self, rank: int, parameter: mapping.LocalParameter) -> None:
        # Blocks, also those of experts, are consecutive in the engine's memory, each followed by the engine's padding.
        tensor, is_expert, _ = parameter.name.partition("[")
        sizes = self.sizes[rank]
        if not parameter.segments:
            sizes[tensor] = sizes.get(tensor, 0) + math.prod(parameter.shape)
        multiple = 1
        if is_expert:
            multiple = EXPERT_MULTIPLE[self.device]
        for block, end in _with_ends(parameter):
            start = sizes.get(tensor, 0)
            width = -(-(end - block.local_start) // multiple) * multiple
            row = math.prod(parameter.shape) // parameter.shape[block.dim]
            sizes[tensor] = start + width * row
            self.parts[block.hf_name].append(EnginePart(rank, tensor, start, block, width))


def _with_ends(parameter: mapping.LocalParameter) -> list[tuple[mapping.Segment, int]]:
    """Return the blocks by their start, each with the start of the next one: padding belongs to the block before."""
    blocks = sorted(parameter.segments, key=attrgetter("local_start"))
    ends = [block.local_start for block in blocks[1:]]
    return list(zip(blocks, [*ends, *(parameter.shape[b.dim] for b in blocks[-1:])], strict=True))


class IncompleteWeightsError(EngineError, ValueError):
    """A tensor of the model is missing in the stream of buckets, or came twice, or has the wrong shape."""

    attempts = 1


class ExpectedChecksums:
    """Checksums of the Hugging Face tensors that one rank sends, as the engine will compute them.

    Several ranks can fill one engine tensor (experts of several expert-parallel ranks). Each hashes its parts and sends
    its ``partial`` to the rank that compares; there ``digests`` combines them.

    Args:
        tensors: the engine's tensors.
        weights_dtype: dtype of every weight.

    Raises:
        IncompleteWeightsError: a part of the model does not begin at a multiple of 4 bytes.
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: dtype) -> None:
        self._tensors = tensors
        self._dtype = weights_dtype
        self._shapes = mapping.hf_tensors(tensors.shape)
        self._seen: set[str] = set()
        self._hashes: dict[tuple[int, str], TiledHash] = {}
        self._unfinished: list[Callable[[], None]] = []
        for name, parts in tensors.parts.items():
            for part in parts:
                if self._byte(part) % WORD:
                    raise IncompleteWeightsError(
                        f"weight update: {name} begins at byte {self._byte(part)} of {part.tensor} in the engine; "
                        f"expected a multiple of {WORD}, which checksums need"
                    )

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Start one kernel that hashes the next bucket. On a GPU, ``partial`` is the first to wait for it.

        Raises IncompleteWeightsError for an unknown or repeated tensor, or one of the wrong shape or dtype.
        """
        parts: list[Part] = []
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                stream = self._hash(part.rank, part.tensor)
                parts.append((stream, part.cut(tensor), self._byte(part)))
        self._unfinished.append(add_parts(parts))

    def partial(self) -> Any:
        """Return the names and partial sums of all added tensors, as JSON values."""
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()
        sums = [[rank, name, h.state()] for (rank, name), h in self._hashes.items()]
        return [sorted(self._seen), sums]

    def digests(self, partials: Sequence[Any]) -> list[dict[str, str]]:
        """Combine the ``partials`` of all ranks into the checksum of every engine tensor, for each engine rank.

        Raises IncompleteWeightsError that names the tensors that no rank sent, or that two ranks sent.
        """
        sent_names: list[str] = []
        for names, _ in partials:
            sent_names += names
        self._check_complete(sent_names)
        hashes: dict[tuple[int, str], TiledHash] = {}
        for rank, sizes in enumerate(self._tensors.sizes):
            for name, elements in sizes.items():
                hashes[rank, name] = TiledHash(elements * self._dtype.itemsize)
        unfilled_tensors = set(hashes)
        for _, sums in partials:
            for rank, name, state in sums:
                hashes[rank, name].merge(state)
                unfilled_tensors.discard((rank, name))
        for rank, name in unfilled_tensors:
            # No Hugging Face tensor fills this engine tensor: it is padding, which the engine hashes too.
            elements = self._tensors.sizes[rank][name]
            hashes[rank, name].add(zeros(elements, dtype=self._dtype), 0)
        digests = []
        for rank, sizes in enumerate(self._tensors.sizes):
            digests.append({name: hashes[rank, name].hexdigest() for name in sizes})
        return digests

    def _check_complete(self, names: list[str]) -> None:
        missing_names = sorted(self._shapes.keys() - set(names))
        if missing_names:
            raise IncompleteWeightsError(
                f"weight update: {len(missing_names)} tensors were never sent: {', '.join(missing_names[:5])}"
                f"{', ...' if len(missing_names) > 5 else ''}"
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
