"""Read and write tensors of safetensors files by rows, with memory for one block; check stores of tensors.

A safetensors file has a length of 8 bytes (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes without gaps. A row is an index of dim 0; rows are contiguous.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.mapping import carried_names, file_dtypes, hf_tensors, packed_names
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape
from megatron_dppo.system.failpoints import file_failpoint
from megatron_dppo.system.text import first_of

CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""Types that can be written -> their code in safetensors."""
DTYPES = {code: dtype for dtype, code in CODES.items()} | {"U8": torch.uint8}
"""Codes that can be read -> their type. Weights of 8 and 4 bits need their scales (``convert/quantized.py``)."""
MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class PackedIn:
    """A packed tensor of a file. Its parts are matrices of single experts.

    The shape is [``experts``, rows, ...], and with ``is_transposed`` [``experts``, columns, rows].
    """

    name: str
    experts: int
    is_transposed: bool = False


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a stored tensor. With ``packed_in``, it is written as a part of a packed tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    packed_in: PackedIn | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dim 0."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Entry(TensorSpec):
    """A tensor in a file. ``offset`` is the position of its first byte in the file.

    With ``is_transposed`` the file has the columns of the matrix, one after another, in place of its rows.
    """

    offset: int = 0
    is_transposed: bool = False


def packed_specs(shape: ModelShape, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return ``specs`` with ``packed_in`` set for each matrix that files of the model's family pack."""
    packed_of = packed_names(shape)
    result: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        packed_in = None
        if name in packed_of:
            packed = packed_of[name]
            packed_in = PackedIn(packed.name, shape.num_experts, packed.is_transposed)
        result[name] = replace(spec, packed_in=packed_in)
    return result


def part_names_of_file_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
    """Return, for a file with ``specs``: the name of each tensor in the file -> the names of its parts.

    The tensors are in the order of their first parts. A tensor that is not packed is its own only part.
    """
    part_names: dict[str, list[str]] = {}
    for name, spec in specs.items():
        file_name = name if spec.packed_in is None else spec.packed_in.name
        part_names.setdefault(file_name, []).append(name)
    return part_names


def _file_tensor(parts: Sequence[TensorSpec]) -> TensorSpec:
    """Return the tensor of a file that consists of ``parts``."""
    first = parts[0]
    if first.packed_in is None:
        return first
    experts = first.packed_in.experts
    rows = sum(part.shape[0] for part in parts) // experts
    if first.packed_in.is_transposed:
        return TensorSpec((experts, first.shape[1], rows), first.dtype)
    return TensorSpec((experts, rows, *first.shape[1:]), first.dtype)


class SafetensorsFile:
    """A file open for reading. Raises CheckpointError if it is missing, truncated or malformed."""

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
        except OSError as error:
            # A folder can be opened, and has no bytes.
            os.close(self._fd)
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
        # (name, matrix) of the transposed matrix that was read last. Its rows are not contiguous in the file, so the
        # file is read once for the whole matrix, and the following calls for its rows use this copy.
        self._transposed: tuple[str, torch.Tensor] | None = None

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read rows ``start .. start + count`` of a tensor into new memory on the CPU."""
        entry = self.entries[name]
        if entry.is_transposed:
            return self._read_transposed(name, entry)[start : start + count].clone()
        out = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
        offset = entry.offset + start * entry.row_bytes
        read_all(self._fd, byte_view(out), offset, f"{self.path}: ended inside {name}")
        return out

    def _read_transposed(self, name: str, entry: Entry) -> torch.Tensor:
        """Read a transposed matrix as a whole. If the last call read the same matrix, return the kept copy."""
        if self._transposed is None or self._transposed[0] != name:
            columns = torch.empty(entry.shape[::-1], dtype=entry.dtype)
            read_all(
                self._fd, byte_view(columns), entry.offset, f"{self.path}: ended inside {name}"
            )
            self._transposed = name, columns.t().contiguous()
        return self._transposed[1]

    def close(self) -> None:
        os.close(self._fd)


def _read_header(fd: int, path: Path) -> dict[str, Entry]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    # Check the length before reading the header, so that a damaged length cannot cause a huge allocation.
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: {size} bytes cannot hold a header of {length} bytes; truncated or another format"
        )
    try:
        header = json.loads(os.pread(fd, length, 8), object_pairs_hook=_unique_keys)
    # json raises ValueError for text that is no JSON, and RecursionError for text that is nested too deeply.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: its header is not JSON with one entry for each name ({error})"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is a {type(header).__name__}, expected a table")
    header.pop("__metadata__", None)
    entries: dict[str, Entry] = {}
    for name, facts in header.items():
        entries[name] = _entry(path, name, facts, 8 + length)
    end = 8 + length

    def offset(name: str) -> int:
        return entries[name].offset

    for name in sorted(entries, key=offset):
        entry = entries[name]
        if entry.offset != end:
            raise CheckpointError(f"{path}: {name} begins at byte {entry.offset}, expected {end}")
        end += entry.bytes
    if end != size:
        raise CheckpointError(
            f"{path}: has {size} bytes, its header describes {end}; truncated or overwritten"
        )
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the table of ``pairs``. Raises ValueError for a name that occurs twice: json would keep the last one."""
    table = dict(pairs)
    if len(table) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} occurs twice")
    return table


class _HeaderEntry(BaseModel):
    """The facts of a tensor in a header. ``data_offsets``: its first byte and the byte after its last one."""

    model_config = ConfigDict(strict=True)

    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


def _entry(path: Path, name: str, facts: Any, base: int) -> Entry:
    """Return the entry of a tensor from its facts in the header. ``base``: position of the first tensor in the file."""
    try:
        checked = _HeaderEntry.model_validate(facts)
    except ValidationError as error:
        raise CheckpointError(f"{path}: header entry {name} is malformed ({facts})") from error
    code = checked.dtype
    if code not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {code}, expected one of {sorted(DTYPES)}")
    begin, end = checked.data_offsets
    entry = Entry(tuple(checked.shape), DTYPES[code], offset=base + begin)
    if end - begin != entry.bytes:
        raise CheckpointError(
            f"{path}: {name} of shape {entry.shape} and dtype {code} has {end - begin} bytes, expected {entry.bytes}"
        )
    return entry


class SafetensorsFileWriter:
    """A new file with known tensors. They can be written in any order. Bytes that are not written are zero.

    Tensors with equal ``packed_in`` are the parts of one tensor in the file, in the order of ``tensors``.
    """

    def __init__(self, path: str | Path, tensors: Mapping[str, TensorSpec]) -> None:
        self.path = Path(path)
        header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        end = 0
        begins: dict[str, int] = {}
        for file_name, part_names in part_names_of_file_tensors(tensors).items():
            start = end
            for name in part_names:
                begins[name] = end
                end += tensors[name].bytes
            file_tensor = _file_tensor([tensors[name] for name in part_names])
            header[file_name] = {
                "dtype": CODES[file_tensor.dtype],
                "shape": list(file_tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        # Pad the header with spaces, as the format asks, so that the first tensor is aligned to 8 bytes.
        text += b" " * (-len(text) % 8)
        self._length = len(text).to_bytes(8, "little")
        base = 8 + len(text)
        self.entries: dict[str, Entry] = {}
        for name, spec in tensors.items():
            is_transposed = spec.packed_in is not None and spec.packed_in.is_transposed
            self.entries[name] = Entry(
                spec.shape, spec.dtype, offset=base + begins[name], is_transposed=is_transposed
            )
        # Name of a transposed matrix -> the matrix, and the number of its rows that were written.
        self._unfinished: dict[str, tuple[torch.Tensor, int]] = {}
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file_failpoint("create", self.path.name)
        os.ftruncate(self._fd, base + end)
        _write_all(self._fd, memoryview(text), len(self._length))

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write ``rows`` (contiguous or not, of the entry's dtype) at row ``start`` of a tensor."""
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
        if entry.is_transposed:
            self._write_transposed(name, entry, start, rows)
            return
        _write_all(self._fd, byte_view(rows), entry.offset + start * entry.row_bytes)

    def _write_transposed(self, name: str, entry: Entry, start: int, rows: torch.Tensor) -> None:
        """Keep ``rows`` of a transposed matrix, and write the matrix with its last rows."""
        matrix, count = self._unfinished.pop(name, (None, 0))
        if matrix is None:
            matrix = torch.empty(entry.shape, dtype=entry.dtype)
        matrix[start : start + len(rows)] = rows
        count += len(rows)
        if count < len(matrix):
            self._unfinished[name] = matrix, count
            return
        _write_all(self._fd, byte_view(matrix.t()), entry.offset)

    def _keep_half(self) -> None:
        os.ftruncate(self._fd, os.fstat(self._fd).st_size // 2)

    def __enter__(self) -> SafetensorsFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Write the header's length, at the beginning of the file, last: until then the file is not valid.
            if kind is None:
                file_failpoint("write", self.path.name, self._keep_half)
                _write_all(self._fd, memoryview(self._length), 0)
        finally:
            os.close(self._fd)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order (a copy of a strided tensor). The view keeps the tensor alive."""
    return memory_of(tensor.detach().contiguous())


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The view keeps the tensor alive."""
    # ``tensor.numpy()`` would make the storage permanently non-resizable. ``trainer/parking.py`` resizes storages.
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def read_all(fd: int, view: memoryview, offset: int, fault: str) -> None:
    """Fill ``view`` from byte ``offset`` of a file. Raises CheckpointError with ``fault`` if the file ends before."""
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise CheckpointError(fault)
        view = view[count:]
        offset = offset + count


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset = offset + count


# A block of this size is still in a core's cache when it is hashed and written, and the allocator reuses its pages. The
# size is large enough that Python's overhead for a block is small. In a measurement from 256 KiB to 32 MiB it was the
# fastest size, and the least disturbed by a busy kernel.
BLOCK_BYTES = 1 << 20
"""Bytes of one read or write. Streaming holds a few blocks in memory."""

_CAST = "`megatron-dppo convert hf-to-megatron --dtype ...` casts all to one"
SHOWN = 5
"""Largest number of differences between a checkpoint and its config.json that an error lists."""


class TensorStore(Protocol):
    """Hugging Face tensors by name, in any kind of files."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor."""

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of dim 0."""


def read_slice(
    store: TensorStore, name: str, dim: int = 0, start: int = 0, length: int | None = None
) -> torch.Tensor:
    """Read ``tensor.narrow(dim, start, length)`` of a stored tensor, contiguous, with memory for one more block."""
    dims = store.specs[name].shape
    if length is None:
        length = dims[dim] - start
    if dim == 0:
        return store.read_rows(name, start, length)
    out_dims = list(dims)
    out_dims[dim] = length
    out = torch.empty(out_dims, dtype=store.specs[name].dtype)
    for row, count in row_blocks(store.specs[name]):
        out[row : row + count] = store.read_rows(name, row, count).narrow(dim, start, length)
    return out


def row_blocks(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """Yield ``(start, count)`` of the row blocks of a tensor. A block has at least one row."""
    rows = max(1, BLOCK_BYTES // spec.row_bytes)
    for start in range(0, spec.shape[0], rows):
        yield start, min(rows, spec.shape[0] - start)


def check_tensors(specs: Mapping[str, TensorSpec], shape: ModelShape, location: str) -> None:
    """Raise CheckpointError if names or shapes of ``specs`` differ from the tensors of ``shape``. The message lists the
    differences.

    Tensors that are only copied (``carried_names``) may be missing, and may have any shape.
    """
    model_tensors = hf_tensors(shape)
    _, output = family_of(shape).vocabulary_tensors
    # A tied model may also store its output layer. ``model_tensors`` does not have it; ``check_tied_copy`` compares it.
    names = set(specs)
    if shape.tied_embeddings:
        names.discard(output)
    missing_names = [name for name in model_tensors if name not in names]
    unknown_names = sorted(names - set(model_tensors) - set(carried_names(shape, names)))
    faults = []
    if missing_names:
        faults.append(f"{len(missing_names)} missing, first {missing_names[0]}")
    if unknown_names:
        faults.append(f"{len(unknown_names)} unknown, first {unknown_names[0]}")
    for name, dims in model_tensors.items():
        if name in names and tuple(specs[name].shape) != dims:
            faults.append(f"{name} has shape {tuple(specs[name].shape)}, config.json says {dims}")
    if faults:
        listed = first_of(faults, SHOWN)
        raise CheckpointError(
            f"{location}: its tensors differ from the model in its config.json ({listed})"
        )


def check_dtypes(store: TensorStore, shape: ModelShape, location: str) -> None:
    """Raise CheckpointError if a store has several dtypes, or a dtype that models do not have.

    The tensors of ``mapping.file_dtypes`` may have the dtype of that table, or the dtype of all other tensors.
    """
    dtypes = dtypes_of(store, shape)
    if len(dtypes) != 1:
        raise CheckpointError(
            f"{location}: tensors of several dtypes, {dtypes}; expected one; {_CAST}"
        )
    model_dtype = dtypes[0]
    if model_dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{location}: tensors of dtype {model_dtype}, expected one of {sorted(ITEM_BYTES)}; {_CAST}"
        )
    for name, own_dtype in file_dtypes(shape).items():
        dtype = str(store.specs[name].dtype).removeprefix("torch.")
        if dtype not in (own_dtype, model_dtype):
            raise CheckpointError(
                f"{location}: {name} has dtype {dtype}, expected {own_dtype} or {model_dtype}"
            )


def dtypes_of(store: TensorStore, shape: ModelShape) -> list[str]:
    """Names of the types of the model's tensors, sorted. Tensors of ``mapping.file_dtypes`` do not count."""
    names = hf_tensors(shape).keys() - file_dtypes(shape).keys()
    dtypes = {store.specs[name].dtype for name in names}
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def require_finite(rows: torch.Tensor, name: str, start: int, location: str) -> None:
    """Raise CheckpointError if an element is NaN or infinite.

    Args:
        rows: Rows of the tensor.
        name: Name of the tensor.
        start: Number of the first row.
        location: The folder, for the message.
    """
    if not rows.numel():
        return
    # Check only the minimum and the maximum: both are NaN if an element is NaN. Checking each element takes ten times
    # as long.
    minimum, maximum = torch.aminmax(rows)
    if math.isfinite(minimum.item()) and math.isfinite(maximum.item()):
        return
    positions = (~torch.isfinite(rows)).nonzero()
    position = tuple(positions[0].tolist())
    index = [position[0] + start, *position[1:]]
    raise CheckpointError(
        f"{location}: {name}{index} is {rows[position].item()}, expected finite weights ({len(positions)} elements of "
        f"{tuple(rows.shape)} from row {start} on are NaN or infinite)"
    )


def check_tied_copy(store: TensorStore, shape: ModelShape, location: str) -> None:
    """Raise CheckpointError if a tied model stores an output layer that differs from its embedding."""
    embedding, output = family_of(shape).vocabulary_tensors
    if not shape.tied_embeddings or output not in store.specs:
        return
    for start, count in row_blocks(store.specs[embedding]):
        embedding_rows = store.read_rows(embedding, start, count)
        output_rows = store.read_rows(output, start, count)
        if not torch.equal(embedding_rows, output_rows):
            raise CheckpointError(
                f"{location}: tie_word_embeddings is true, but {output} differs from {embedding}"
            )
