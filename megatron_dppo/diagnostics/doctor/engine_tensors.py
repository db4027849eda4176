"""Compare the tensors that servers held with the tensors that they should hold by the weights of their version.

The checksums of a weight update compare the sent bytes with the bytes that arrived. They do not show that the quantiser
sent wrong scales, or that a gather sent another version's tensor. Here the expected bytes come from the weights in a
folder, and the trainer's own quantiser makes the expected FP8 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.block_fp8 import DTYPE, block_checksums, encode
from megatron_dppo.convert.quantized import open_weights
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.quantization import BLOCK, SCALE_SUFFIX, is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EnginePart, EngineTensors
from megatron_dppo.weights.server.direct_loading import TensorPlaces
from megatron_dppo.weights.server.held_tensors import HeldTensors

_SAME_FACTOR = 1e-4
"""The ratios of held to expected scales count as one factor if their relative difference is at most this number."""
_NAMED_BLOCKS, _NAMED_TENSORS = 3, 3

_VALUES, _SCALES = "values", "scales"

Block = tuple[str, int, int]
"""Name of a Hugging Face tensor, and the row and column of one of its blocks on the rank."""


@dataclass(frozen=True)
class TensorFault:
    """A tensor of a server that differs from the weights of the server's version.

    Attributes:
        tensor: name of the Hugging Face tensor, or of the engine tensor if the server reported no blocks.
        rank: rank of the server that holds the tensor.
        url: address of the server.
        is_of_quantisation: whether block FP8 is at fault. False for a tensor that is not quantised. Also false if the
            values are another version's, and the scales are right or of that version too.
        difference: how the tensor differs, in words.
    """

    tensor: str
    rank: int
    url: str
    is_of_quantisation: bool
    difference: str


def findings_of(faults: Iterable[TensorFault]) -> list[str]:
    """Return a line for each fault; if many tensors of a rank differ in the same way, one line for all of them."""
    groups: dict[tuple[str, int, bool, str], list[str]] = {}
    for fault in faults:
        key = (fault.url, fault.rank, fault.is_of_quantisation, fault.difference)
        groups.setdefault(key, []).append(fault.tensor)
    lines: list[str] = []
    for (url, rank, is_of_quantisation, difference), tensors in groups.items():
        axis = "quantisation" if is_of_quantisation else "weights"
        names = tensors
        if len(tensors) > _NAMED_TENSORS:
            names = [f"{len(tensors)} tensors, such as {tensors[0]}"]
        lines += [f"engine: {axis}: {n}: {difference} (rank {rank} of {url})" for n in names]
    return lines


@dataclass(frozen=True)
class _PartDifference:
    """How the values or the scales of one tensor differ: a part of a ``TensorFault``.

    ``kind`` is ``_VALUES`` or ``_SCALES``, or empty for a tensor without blocks. ``is_of_weights``: whether the
    weights may be at fault, not block FP8. It is true if the tensor has no blocks, or if the differing blocks are
    blocks of another version.
    """

    kind: str
    text: str
    is_of_weights: bool = False


class RankTensors:
    """The tensors that a rank must hold if its server has the weights in ``folder``.

    Args:
        held: the tensors that the server held; ``held.layout`` is the server's layout.
        rank: number of the rank.
        folder: Hugging Face folder of the weights.
        shape: shape of the model.
        dtype: dtype of the trainer's weights.

    Raises LayoutError, OSError and CheckpointError.
    """

    def __init__(
        self, held: HeldTensors, rank: int, folder: Path, shape: ModelShape, dtype: torch.dtype
    ) -> None:
        self._rank = rank
        self._table = EngineTensors(
            shape, held.layout, held.device, quantized=held.quantized, only_rank=rank
        )
        self.flat_tensors: dict[str, Tensor] = {}
        for name, size in self._table.sizes[rank].items():
            zeros = torch.zeros(size, dtype=self._table.dtype_of(name, dtype))
            self.flat_tensors[name] = zeros
        places = TensorPlaces(self._table, rank, self.flat_tensors)
        with open_weights(folder) as reader:
            for name, dims in hf_tensors(shape).items():
                tensor = reader.read_rows(name, 0, dims[0]).reshape(dims)
                if held.quantized and is_quantized(name):
                    places.load(encode(name, tensor.to(dtype)))
                else:
                    places.load([(name, tensor.to(self._table.sent_dtype(name, dtype)))])

    def parts(self, engine_tensor: str) -> Iterator[tuple[str, EnginePart]]:
        """Yield the Hugging Face tensors in an engine tensor, each with its place in the engine tensor."""
        for name, parts in self._table.parts.items():
            for part in parts:
                if part.rank == self._rank and part.tensor == engine_tensor:
                    yield name, part

    def dims_of(self, name: str, part: EnginePart) -> list[int]:
        """Return the shape of a Hugging Face tensor's part in the engine."""
        dims = list(self._table.shapes[name])
        dims[part.block.dim] = part.width
        return dims

    def blocks(self, name: str, part: EnginePart) -> Tensor:
        """Return a number for each block of a part: its scale if ``name`` is a tensor of scales, else its checksum."""
        dims = self.dims_of(name, part)
        size = dims[0] * dims[1]
        matrix = self.flat_tensors[part.tensor][part.start : part.start + size].view(dims)
        return matrix if name.endswith(SCALE_SUFFIX) else block_checksums(matrix)


def tensor_faults(
    held: HeldTensors,
    rank: int,
    own: RankTensors,
    load_others: Callable[[], Mapping[int, RankTensors]],
) -> list[TensorFault]:
    """Return a fault for each tensor of the rank that differs from the tensor that it must hold (``own``).

    ``load_others`` returns, for each other version, the tensors that the rank would hold if it had that version. It is
    called only if a tensor differs.

    Raises ValueError if the server's answer is not in base64.
    """
    checksums = held.checksums(rank)
    different = [
        name for name, flat in own.flat_tensors.items() if tiled_hash(flat) != checksums.get(name)
    ]
    if not different:
        return []
    others = load_others()
    differences: dict[str, list[_PartDifference]] = {}
    for engine_tensor in different:
        held_blocks = held.blocks(rank, engine_tensor)
        if held_blocks is None:
            text = "differs from the tensor of its version"
            for version, tensors in others.items():
                if tiled_hash(tensors.flat_tensors[engine_tensor]) == checksums.get(engine_tensor):
                    text = f"is the tensor of version {version}"
            differences[engine_tensor] = [_PartDifference("", text, is_of_weights=True)]
            continue
        for name, difference in _block_differences(engine_tensor, held_blocks, own, others):
            differences.setdefault(name.removesuffix(SCALE_SUFFIX), []).append(difference)
    faults: list[TensorFault] = []
    for name, parts in differences.items():
        text = "; ".join(f"{part.kind} {part.text}".strip() for part in parts)
        # Scales of another version beside right values are a fault of the quantisation, not of the weights.
        only_scales_differ = all(part.kind == _SCALES for part in parts)
        is_of_weights = all(part.is_of_weights for part in parts) and not only_scales_differ
        faults.append(TensorFault(name, rank, held.url, not is_of_weights, text))
    return faults


def _block_differences(
    engine_tensor: str, held_blocks: Tensor, own: RankTensors, others: Mapping[int, RankTensors]
) -> Iterator[tuple[str, _PartDifference]]:
    """Yield the Hugging Face tensors of an engine tensor whose blocks differ, each with its difference."""
    kind = _SCALES if engine_tensor.endswith(SCALE_SUFFIX) else _VALUES
    parts = list(own.parts(engine_tensor))
    # [block rows, block columns] of scales or checksums.
    expected_grids = {name: own.blocks(name, part) for name, part in parts}
    # Scale or checksum -> the block that should have it. By this map, ``_moved`` recognises a block in a wrong place.
    place_of: dict[float, Block] = {}
    for name, grid in expected_grids.items():
        for row, values in enumerate(grid.tolist()):
            for column, value in enumerate(values):
                place_of.setdefault(value, (name, row, column))
    for name, part in parts:
        grid = expected_grids[name]
        # ``held_blocks`` has one number for each scale, or one checksum for each block of FP8 values.
        elements_per_number = 1
        if own.flat_tensors[engine_tensor].dtype == DTYPE:
            elements_per_number = BLOCK * BLOCK
        start = part.start // elements_per_number
        held_grid = held_blocks[start : start + grid.numel()].view(grid.shape)
        is_different = held_grid != grid
        if not is_different.any():
            continue
        places = _places(is_different)
        held_version = None
        for version, tensors in others.items():
            other_grid = tensors.blocks(name, part)
            if torch.equal(held_grid[is_different], other_grid[is_different]):
                held_version = version
                break
        if held_version is not None:
            text = f"of {places} of version {held_version}"
            yield name, _PartDifference(kind, text, is_of_weights=True)
            continue
        moved_blocks = _moved(held_grid, is_different, name, place_of)
        if moved_blocks is not None:
            yield name, _PartDifference(kind, f"of {moved_blocks}")
        elif kind == _SCALES:
            factors = held_grid[is_different] / grid[is_different]
            yield name, _PartDifference(kind, f"of {places} {_factors(factors)}")
        else:
            yield name, _PartDifference(kind, f"of {places} differ")


def _moved(
    held_grid: Tensor, is_different: Tensor, name: str, place_of: Mapping[float, Block]
) -> str | None:
    """Return in words which block is in which wrong place; None if a differing block is not in ``place_of``."""
    sources: dict[tuple[int, int], Block] = {}
    for row, column in is_different.nonzero().tolist():
        source = place_of.get(held_grid[row, column].item())
        if source is None:
            return None
        sources[row, column] = source
    texts: list[str] = []
    for place, (source_name, row, column) in sources.items():
        where = f"block ({row}, {column})"
        if source_name != name:
            where += f" of {source_name}"
        texts.append(f"{where} in the place of {place}")
    more = ", ..." if len(texts) > _NAMED_BLOCKS else ""
    return ", ".join(texts[:_NAMED_BLOCKS]) + more


def _factors(factors: Tensor) -> str:
    """Describe the ratios of different scales: one factor, or the least and the largest."""
    least, largest = float(factors.min()), float(factors.max())
    if abs(largest - least) <= _SAME_FACTOR * abs(largest):
        return f"times {largest:.4g}"
    return f"times {least:.4g} to {largest:.4g}"


def _places(is_different: Tensor) -> str:
    """Return in words which blocks differ: all, whole rows or columns of blocks, or the first few."""
    if is_different.all():
        return "all blocks"
    for axis, word in ((1, "block row"), (0, "block column")):
        has_difference = is_different.any(dim=axis)
        differs_everywhere = is_different.all(dim=axis)
        # If every line with a difference differs everywhere, the different blocks are whole lines.
        if torch.equal(has_difference, differs_everywhere):
            return _listed(word, has_difference.nonzero()[:, 0].tolist())
    return _listed("block", [tuple(index) for index in is_different.nonzero().tolist()])


def _listed(word: str, items: Sequence[object]) -> str:
    plural = "s" if len(items) > 1 else ""
    more = ", ..." if len(items) > _NAMED_BLOCKS else ""
    return f"{word}{plural} {', '.join(map(str, items[:_NAMED_BLOCKS]))}{more}"
