"""Tensors in files by rows, so that memory is bounded by a block: the safetensors format, and what all stores share.

Of safetensors: 8 bytes little-endian length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes
without a gap. A row is an index of dim 0; rows are contiguous.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What is written."""
DTYPES = {code: dtype for dtype, code in CODES.items()} | {"F8_E4M3": torch.float8_e4m3fn}
"""What is read; 8-bit weights only with their scales, by ``quantized.py``."""
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Entry(TensorSpec):
    """A tensor in a file; ``offset``: of its first byte from the start of the file."""

    offset: int


class SafetensorsFile:
    """A file open for reading. Raises CheckpointError where it is missing, truncated or malformed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened ({error.strerror})") from error
        try:
            self.entries = _read_header(self._fd, self.path)
        except CheckpointError:
            os.close(self._fd)
            raise

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a tensor, freshly allocated, on the CPU."""
        entry = self.entries[name]
        out = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
        offset = entry.offset + start * entry.row_bytes
        read_all(self._fd, byte_view(out), offset, f"{self.path}: ended inside {name}")
        return out

    def close(self) -> None:
        os.close(self._fd)


def _read_header(fd: int, path: Path) -> dict[str, Entry]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    # Before it is read: a damaged length must not make a process allocate what the file says.
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: {size} bytes cannot hold a header of {length} bytes; truncated or another format"
        )
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error})") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, facts, 8 + length) for name, facts in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name} begins at byte {entry.offset}, expected {end}")
        end += entry.bytes
    if end != size:
        raise CheckpointError(
            f"{path}: has {size} bytes, its header describes {end}; truncated or overwritten"
        )
    return entries


def _entry(path: Path, name: str, facts: dict[str, Any], base: int) -> Entry:
    try:
        code, shape = facts["dtype"], tuple(facts["shape"])
        begin, end = facts["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: header entry {name} is malformed ({facts})") from error
    if code not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {code}, expected one of {sorted(DTYPES)}")
    entry = Entry(shape, DTYPES[code], base + begin)
    if end - begin != entry.bytes:
        raise CheckpointError(
            f"{path}: {name} of shape {tuple(shape)} and dtype {code} has {end - begin} bytes"
        )
    return entry


class SafetensorsFileWriter:
    """A file of known tensors, filled in any order. Bytes that nobody writes are zero."""

    def __init__(self, path: str | Path, tensors: Mapping[str, TensorSpec]) -> None:
        self.path = Path(path)
        header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        end = 0
        begins: dict[str, int] = {}
        for name, spec in tensors.items():
            begins[name], end = end, end + spec.bytes
            offsets = [begins[name], end]
            shape = list(spec.shape)
            header[name] = {"dtype": CODES[spec.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        # Padded as the format asks for, so that the first tensor is aligned.
        text += b" " * (-len(text) % 8)
        self._length = len(text).to_bytes(8, "little")
        base = 8 + len(text)
        self.entries = {
            name: Entry(spec.shape, spec.dtype, base + begins[name])
            for name, spec in tensors.items()
        }
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._fd, base + end)
        _write_all(self._fd, memoryview(text), len(self._length))

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Put ``rows`` (contiguous or not, of the entry's dtype) at row ``start`` of a tensor."""
        entry = self.entries[name]
        if (
            rows.dtype != entry.dtype
            or rows.shape[1:] != entry.shape[1:]
            or start + len(rows) > entry.shape[0]
        ):
            raise ValueError(
                f"{name}: rows {tuple(rows.shape)} {rows.dtype} at {start}, expected to fit "
                f"{tuple(entry.shape)} {entry.dtype}"
            )
        _write_all(self._fd, byte_view(rows), entry.offset + start * entry.row_bytes)

    def __enter__(self) -> SafetensorsFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # The header's length, with which the file begins, comes last: until then nothing reads it as safetensors.
            if kind is None:
                _write_all(self._fd, memoryview(self._length), 0)
        finally:
            os.close(self._fd)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order (a copy where it is strided), which keep it alive."""
    return memory_of(tensor.detach().contiguous())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor that lie one after another, writable; they keep it alive."""
    # Not ``tensor.numpy()``: it makes the storage one that can't be resized, and so never parked, for good.
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def read_all(fd: int, view: memoryview, offset: int, fault: str) -> None:
    """Fill ``view`` from byte ``offset`` of a file. Raises CheckpointError, with ``fault``, where it ends before."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise CheckpointError(fault)
        view, offset = view[count:], offset + count


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


# Small enough that a block is still in a core's cache when it is hashed and written, and that the allocator hands the
# same pages out again; large enough that Python's work on a block costs little. Of 256 KiB to 32 MiB the fastest where
# this was tried, and the least disturbed by a busy kernel.
BLOCK_BYTES = 1 << 20
"""Bytes that are read or written at a time: what streaming holds in memory, a few times over."""

_CAST = "`megatron-dppo convert hf-to-megatron --dtype ...` casts all to one"
SHOWN = 5
"""Differences of a checkpoint from its config.json that an error lists."""


class TensorStore(Protocol):
    """Hugging Face tensors by name, wherever they lie."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor."""

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of dim 0."""


def read_slice(
    store: TensorStore, name: str, dim: int = 0, start: int = 0, length: int | None = None
) -> torch.Tensor:
    """``tensor.narrow(dim, start, length)`` of a stored tensor, contiguous; holds one block beside the result."""
    dims = store.specs[name].shape
    length = dims[dim] - start if length is None else length
    if dim == 0:
        return store.read_rows(name, start, length)
    wanted = list(dims)
    wanted[dim] = length
    out = torch.empty(wanted, dtype=store.specs[name].dtype)
    for first, count in row_blocks(store.specs[name]):
        out[first : first + count] = store.read_rows(name, first, count).narrow(dim, start, length)
    return out


def row_blocks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """``(start, count)`` of the row blocks that a tensor is streamed in; a block is at least a row."""
    rows = max(1, BLOCK_BYTES // spec.row_bytes)
    for start in range(0, spec.shape[0], rows):
        yield start, min(rows, spec.shape[0] - start)


def check_tensors(specs: Mapping[str, TensorSpec], shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where names or shapes of ``specs`` are not those of ``shape``; it names all that differ."""
    expected = hf_tensors(shape)
    _, output = family_of(shape).vocabulary_tensors
    # A tied model may store its output layer too; the table leaves it out, and ``check_tied_copy`` compares it.
    present = set(specs) - ({output} if shape.tied_embeddings else set())
    missing, unknown = [n for n in expected if n not in present], sorted(present - set(expected))
    faults = [f"{len(missing)} missing, first {missing[0]}"] if missing else []
    faults += [f"{len(unknown)} unknown, first {unknown[0]}"] if unknown else []
    faults += [
        f"{name} has shape {tuple(specs[name].shape)}, config.json says {dims}"
        for name, dims in expected.items()
        if name in present and tuple(specs[name].shape) != dims
    ]
    if faults:
        more = [f"{len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        shown = "; ".join(faults[:SHOWN] + more)
        raise CheckpointError(f"{where}: its tensors are not those of its config.json ({shown})")


def check_store(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a store's names or shapes are not what ``shape`` describes, or dtypes several."""
    check_tensors(store.specs, shape, where)
    kinds = dtypes_of(store, shape)
    if len(kinds) != 1:
        raise CheckpointError(f"{where}: tensors of several dtypes, {kinds}; expected one; {_CAST}")
    if kinds[0] not in ITEM_BYTES:
        raise CheckpointError(f"{where}: tensors of dtype {kinds[0]}, expected another; {_CAST}")


def dtypes_of(store: TensorStore, shape: ModelShape) -> list[str]:
    """Names of the types of the model's tensors, sorted."""
    kinds = {store.specs[name].dtype for name in hf_tensors(shape)}
    return sorted(str(kind).removeprefix("torch.") for kind in kinds)


def require_finite(rows: torch.Tensor, name: str, start: int, where: str) -> None:
    """Raise CheckpointError where an element is NaN or infinite.

    Args:
        rows: of the tensor ``name``.
        name: as the message calls the tensor.
        start: number of the first row.
        where: the folder.
    """
    if not rows.numel():
        return
    # The largest and the smallest tell: NaN is both where it occurs. Ten times as fast as to ask of each element.
    lowest, highest = torch.aminmax(rows)
    if math.isfinite(lowest.item()) and math.isfinite(highest.item()):
        return
    wrong = (~torch.isfinite(rows)).nonzero()
    first = tuple(wrong[0].tolist())
    index = [first[0] + start, *first[1:]]
    raise CheckpointError(
        f"{where}: {name}{index} is {rows[first].item()}, expected finite weights ({len(wrong)} elements of "
        f"{tuple(rows.shape)} from row {start} on are NaN or infinite)"
    )


def check_tied_copy(store: TensorStore, shape: ModelShape, where: str) -> None:
    """Raise CheckpointError where a tied model stores an output layer that is not its embedding."""
    names = family_of(shape).vocabulary_tensors
    if not shape.tied_embeddings or names[1] not in store.specs:
        return
    for start, count in row_blocks(store.specs[names[0]]):
        first, second = (store.read_rows(name, start, count) for name in names)
        if not torch.equal(first, second):
            raise CheckpointError(
                f"{where}: tie_word_embeddings is true, but {names[1]} differs from {names[0]}"
            )
