"""The checksums that an engine must report, computed from the Hugging Face tensors that the trainer sends.

Tensors come in buckets, in any order, from one rank or several. ``megatron_dppo/tensor_hash`` has the hash itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dppo import block_fp8
from megatron_dppo.engine.errors import EngineError
from megatron_dppo.model import mapping, quantization
from megatron_dppo.model.engine_layout import check_engine_layout
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.shard_plan import kept_elements
from megatron_dppo.model.splits import Dims
from megatron_dppo.system.garbage import paused_collection
from megatron_dppo.system.text import first_of
from megatron_dppo.tensor_hash import WORD, Part, TiledHash, add_parts

EXPERT_MULTIPLE = {"cpu": 32, "cuda": 1}
"""By device: the engine pads a rank's share of an expert's intermediate dimension with zeros to a multiple of this."""


@dataclass(frozen=True, slots=True)
class EnginePart:
    """The place of one block of a Hugging Face tensor in the engine's memory.

    Attributes:
        rank: the engine rank that holds the block.
        tensor: name of the engine tensor.
        start: first element in the engine tensor.
        block: the block of the Hugging Face tensor.
        width: length of the block's dimension in the engine. Zeros fill the part beyond the block.
        adds_one: whether the engine holds 1 + the block.
    """

    rank: int
    tensor: str
    start: int
    block: mapping.Segment
    width: int
    adds_one: bool = False

    def views(self, dims: Dims, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the view of the engine tensor, given as a vector, that holds the block, and the view of its padding.

        ``dims``: the shape of the whole Hugging Face tensor. Without padding the second view is None.
        """
        block = self.block
        held_dims = list(dims)
        held_dims[block.dim] = self.width
        region = flat[self.start : self.start + math.prod(held_dims)].view(held_dims)
        padding = None
        if self.width > block.length:
            padding = region.narrow(block.dim, block.length, self.width - block.length)
        return region.narrow(block.dim, 0, block.length), padding

    def cut(self, hf_tensor: Tensor, engine_dtype: torch.dtype) -> Tensor:
        """Compute the part's values in the engine from the whole Hugging Face tensor.

        The result is a view of ``hf_tensor`` if the engine holds the same values in the same dtype, else a copy.
        """
        part = hf_tensor
        if self.block.length != hf_tensor.shape[self.block.dim]:
            part = self.block.of_hf(hf_tensor)
        part = part.to(engine_dtype)
        if self.adds_one:
            part = part + 1
        padding = self.width - self.block.length
        if padding == 0:
            return part
        # F.pad takes (before, after) of each dimension, from the last one on: pad only the end of the block's
        # dimension.
        later_dims = part.dim() - 1 - self.block.dim
        no_padding = (0, 0) * later_dims
        return F.pad(part, (*no_padding, 0, padding))


ONE_RANK = mapping.EngineLayout()


class EngineTensors:
    """The tensors of a served model on the ranks of a "cpu" or "cuda" engine.

    The engine computes one checksum for each of these tensors. Raises LayoutError if the model cannot be divided among
    the ranks.

    With ``quantized``, linear layers and experts are block FP8 (``model/quantization.py``): the engine receives and
    holds their scales as separate tensors.

    ``only_rank``: list the tensors of this rank only; None: list the tensors of all ranks.

    Attributes:
        shapes: the shape of each tensor that the engine must receive, by its name in a checkpoint.
        parts: the places of each of these tensors in the engine, by its name in a checkpoint.
        sizes: for each rank, the number of elements of each engine tensor. Elements that no part fills are zero, for
            example the padding of a vocabulary.
    """

    @paused_collection()
    def __init__(
        self,
        shape: ModelShape,
        layout: mapping.EngineLayout = ONE_RANK,
        device: str = "cuda",
        *,
        quantized: bool = False,
        only_rank: int | None = None,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.ranks = layout.tensor
        self.device = device
        self.quantized = quantized
        self.shapes = mapping.hf_tensors(shape)
        if quantized:
            check_engine_layout(shape, layout)
            quantization.check_block_widths(shape, layout)
            self.shapes = quantization.stored_tensors(self.shapes)
        self.parts: dict[str, list[EnginePart]] = {name: [] for name in self.shapes}
        self.sizes: list[dict[str, int]] = [{} for _ in range(self.ranks)]
        self._engine_dtypes: dict[str, torch.dtype] = {}
        self._fixed_dtypes: dict[str, torch.dtype] = {}
        for name, own_dtype in mapping.own_dtypes(shape).items():
            self._fixed_dtypes[name] = getattr(torch, own_dtype)
        listed_ranks: Iterable[int] = range(self.ranks)
        if only_rank is not None:
            listed_ranks = (only_rank,)
        for rank in listed_ranks:
            for parameter in mapping.engine_parameters(shape, layout, rank):
                self._add(rank, parameter)
                if quantized and quantization.holds_quantized(parameter):
                    scales = quantization.scale_parameter(parameter)
                    self._add(rank, scales)
                    self._engine_dtypes[_tensor_of(parameter)] = block_fp8.DTYPE
                    self._engine_dtypes[_tensor_of(scales)] = torch.float32

    @classmethod
    def of_server(
        cls, shape: ModelShape, info: Mapping[str, Any], only_rank: int | None = None
    ) -> Self:
        """Return the tensors of a server of ``shape``, from the arguments that it reports in ``/server_info``.

        Raises LayoutError as the constructor does.
        """
        is_quantized = info.get("quantization") is not None
        return cls(
            shape,
            mapping.EngineLayout.of_options(info),
            str(info["device"]),
            quantized=is_quantized,
            only_rank=only_rank,
        )

    @property
    def hold_what_is_sent(self) -> bool:
        """Whether every tensor of a checkpoint can be read back from the engine.

        A tensor that the engine holds only as 1 + its values can't be read back: rounding the sum has removed bits.
        """
        return all(_has_own_values(parts) for parts in self.parts.values())

    def dtype_of(self, tensor: str, weights_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an engine tensor: ``weights_dtype`` unless it is quantised or has a fixed dtype."""
        return self._engine_dtypes.get(tensor, weights_dtype)

    def sent_dtype(self, name: str, weights_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that the tensor ``name`` of a checkpoint must have when the engine receives it."""
        if name in self._fixed_dtypes:
            return self._fixed_dtypes[name]
        if not self.quantized:
            return weights_dtype
        if name.endswith(quantization.SCALE_SUFFIX):
            return torch.float32
        return block_fp8.DTYPE if quantization.is_quantized(name) else weights_dtype

    def kept_bytes(self, weights_dtype: torch.dtype) -> int:
        """Return the bytes of a checkpoint that all ranks hold: the fewest bytes that an update moves into the engine.

        An element that several ranks hold counts for each of them, but only once if a rank holds it twice.
        """
        size = 0
        for name, parts in self.parts.items():
            in_order = sorted(parts, key=attrgetter("block.hf_start"))
            held = ((part.rank, part.block) for part in in_order)
            elements = kept_elements(self.shapes[name], held).total()
            size += elements * self.sent_dtype(name, weights_dtype).itemsize
        return size

    def _add(self, rank: int, parameter: mapping.EngineParameter) -> None:
        """Append the blocks of ``parameter`` to the engine tensor that holds it on ``rank``."""
        # Blocks, also those of different experts, are consecutive in the engine's memory. The engine's padding follows
        # each block.
        # The name of an expert's parameter is the engine tensor's name, followed by the expert's number in brackets.
        tensor, bracket, _ = parameter.name.partition("[")
        is_expert = bracket != ""
        sizes = self.sizes[rank]
        if parameter.dtype is not None:
            self._engine_dtypes[tensor] = getattr(torch, parameter.dtype)
        if not parameter.segments:
            # The rank's whole share is padding.
            sizes[tensor] = sizes.get(tensor, 0) + math.prod(parameter.shape)
        multiple = 1
        if is_expert and not self.quantized:
            multiple = EXPERT_MULTIPLE[self.device]
            if multiple > 1:
                # SGLang on a CPU pads an expert's dimension to a multiple of multiple * layout.tensor. Only
                # layout.tensor / layout.expert ranks share the dimension. So the share of a rank is a multiple of the
                # quotient: multiple * layout.expert.
                multiple *= self.layout.expert
        for block, end in _blocks_with_ends(parameter):
            start = sizes.get(tensor, 0)
            length = end - block.local_start
            width = math.ceil(length / multiple) * multiple
            row_elements = math.prod(parameter.shape) // parameter.shape[block.dim]
            sizes[tensor] = start + width * row_elements
            self.parts[block.hf_name].append(
                EnginePart(rank, tensor, start, block, width, parameter.adds_one)
            )


def _has_own_values(parts: Sequence[EnginePart]) -> bool:
    """Return whether at least one of a tensor's ``parts`` holds the tensor's own values, and not 1 + the values."""
    return any(not part.adds_one for part in parts)


def _tensor_of(parameter: mapping.LocalParameter) -> str:
    """Return the name of the engine tensor that holds ``parameter``. The parameter may be only one expert's part of
    this tensor."""
    return parameter.name.partition("[")[0]


def _blocks_with_ends(parameter: mapping.LocalParameter) -> list[tuple[mapping.Segment, int]]:
    """Return the blocks in order, each with its end: the start of the next block, or the end of the parameter.

    So padding between two blocks belongs to the block before it.
    """
    blocks = sorted(parameter.segments, key=attrgetter("local_start"))
    ends = [block.local_start for block in blocks[1:]]
    if blocks:
        ends.append(parameter.shape[blocks[-1].dim])
    return list(zip(blocks, ends, strict=True))


class IncompleteWeightsError(EngineError, ValueError):
    """A tensor of the model is missing in the stream of buckets, was sent twice, or has the wrong shape.

    A retry is pointless: the sender would send the same tensors again.
    """

    attempts = 1


class ExpectedChecksums:
    """Checksums of the Hugging Face tensors that one rank sends, as the engine will compute them.

    Several ranks can fill one engine tensor (experts of several expert-parallel ranks). Each rank hashes its parts and
    sends its ``partial`` to the rank that compares. On that rank ``digests`` combines all partials.

    Args:
        tensors: the engine's tensors.
        weights_dtype: dtype of the weights, except for weights that are quantised or have a fixed dtype.

    Raises:
        IncompleteWeightsError: a part of the model does not begin at a multiple of 4 bytes.
    """

    def __init__(self, tensors: EngineTensors, weights_dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = weights_dtype
        self._shapes = tensors.shapes
        self._seen: set[str] = set()
        self._hashes: dict[tuple[int, str], TiledHash] = {}
        self._unfinished: list[Callable[[], None]] = []
        for name, parts in tensors.parts.items():
            for part in parts:
                first_byte = self._first_byte(part)
                if first_byte % WORD:
                    raise IncompleteWeightsError(
                        f"weight update: {name} begins at byte {first_byte} of {part.tensor} in the engine; "
                        f"expected a multiple of {WORD}, which checksums need"
                    )

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Start one kernel that hashes the next bucket. On a GPU only ``partial`` waits for the kernel.

        Raises IncompleteWeightsError for an unknown or repeated tensor, or a wrong shape or dtype.
        """
        parts: list[Part] = []
        for name, tensor in bucket:
            self._check(name, tensor)
            for part in self._tensors.parts[name]:
                tensor_hash = self._unfinished_hash(part.rank, part.tensor)
                engine_values = part.cut(tensor, self._engine_dtype(part.tensor))
                parts.append((tensor_hash, engine_values, self._first_byte(part)))
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
                hashes[rank, name] = TiledHash(elements * self._engine_dtype(name).itemsize)
        unfilled_tensors = set(hashes)
        for _, sums in partials:
            for rank, name, state in sums:
                hashes[rank, name].merge(state)
                unfilled_tensors.discard((rank, name))
        for rank, name in unfilled_tensors:
            # No Hugging Face tensor fills this engine tensor: it is padding. The engine hashes padding too.
            elements = self._tensors.sizes[rank][name]
            hashes[rank, name].add(torch.zeros(elements, dtype=self._engine_dtype(name)), 0)
        digests = []
        for rank, sizes in enumerate(self._tensors.sizes):
            digests.append({name: hashes[rank, name].hexdigest() for name in sizes})
        return digests

    def _check_complete(self, names: list[str]) -> None:
        missing_names = sorted(self._shapes.keys() - set(names))
        if missing_names:
            raise IncompleteWeightsError(
                f"weight update: {len(missing_names)} tensors were never sent: {first_of(missing_names, 5, ', ')}"
            )
        if len(names) > len(self._shapes):
            repeated_name = next(name for name in names if names.count(name) > 1)
            raise IncompleteWeightsError(f"weight update: {repeated_name} came from two ranks")

    def _check(self, name: str, tensor: Tensor) -> None:
        shape = self._shapes.get(name)
        if shape is None or name in self._seen:
            raise IncompleteWeightsError(
                f"weight update: {name} came twice or is no tensor of this model"
            )
        self._seen.add(name)
        expected_dtype = self._tensors.sent_dtype(name, self._dtype)
        if tensor.shape != shape or tensor.dtype != expected_dtype:
            raise IncompleteWeightsError(
                f"weight update: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(shape)} {expected_dtype}"
            )

    def _unfinished_hash(self, rank: int, tensor: str) -> TiledHash:
        """Return the unfinished hash of an engine tensor; start it if there is none."""
        key = (rank, tensor)
        if key not in self._hashes:
            size = self._tensors.sizes[rank][tensor] * self._engine_dtype(tensor).itemsize
            self._hashes[key] = TiledHash(size)
        return self._hashes[key]

    def _engine_dtype(self, tensor: str) -> torch.dtype:
        return self._tensors.dtype_of(tensor, self._dtype)

    def _first_byte(self, part: EnginePart) -> int:
        """Return the position of the part's first byte in its engine tensor."""
        return part.start * self._engine_dtype(part.tensor).itemsize
