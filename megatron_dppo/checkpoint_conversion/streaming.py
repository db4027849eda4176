"""Convert whole checkpoints block by block: memory is a few blocks, whatever the model.

Every Hugging Face tensor is read once and written once, in row blocks of BLOCK_BYTES, and hashed on the way in a second
thread. Outputs are staged and renamed, so an interrupted conversion leaves nothing that loads; a rerun starts clean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion.certificate import TORCH_DTYPES, Certificate
from megatron_dppo.checkpoint_conversion.errors import CheckpointError, MismatchError
from megatron_dppo.checkpoint_conversion.families import load_model_shape
from megatron_dppo.checkpoint_conversion.gather_plan import gather_plan
from megatron_dppo.checkpoint_conversion.hf_io import (
    DEFAULT_SHARD_BYTES,
    SafetensorsReader,
    ShardedWriter,
)
from megatron_dppo.checkpoint_conversion.layout import Layout, check_layout
from megatron_dppo.checkpoint_conversion.mapping import hf_tensors
from megatron_dppo.checkpoint_conversion.model_shape import ModelShape
from megatron_dppo.checkpoint_conversion.publishing import StagedFolder, copy_side_files
from megatron_dppo.checkpoint_conversion.safetensors_file import TensorSpec, byte_view
from megatron_dppo.checkpoint_conversion.sharded_checkpoint import (
    ShardedCheckpoint,
    ShardedCheckpointWriter,
)
from megatron_dppo.checkpoint_conversion.tensor_store import (
    TensorStore,
    check_tied_copy,
    row_blocks,
)

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


def no_progress(count: int) -> None:
    """Report to nobody."""


def hf_to_megatron(
    hf_dir: str | Path,
    out_dir: str | Path,
    layout: Layout,
    *,
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> Certificate:
    """Write ``hf_dir`` in ``layout`` (one file a rank), with its config and tokenizer, and a certificate.

    ``dtype``: of the result; empty: as stored. Raises ConversionError where the input is bad or the
    layout does not fit, and leaves nothing behind.
    """
    shape = load_model_shape(hf_dir)
    check_layout(shape, layout)
    with SafetensorsReader(hf_dir) as reader:
        reader.check(shape)
        check_tied_copy(reader, shape, str(hf_dir))
        source_dtype = _name(next(iter(reader.specs.values())).dtype)
        target = dtype or source_dtype
        plan = {tensor.name: tensor for tensor in gather_plan(shape, layout)}
        hashes = TensorHashes()
        with StagedFolder(out_dir, _model_bytes(shape, TORCH_DTYPES[target])) as folder, hashes:
            with ShardedCheckpointWriter(folder, shape, layout, TORCH_DTYPES[target]) as writer:
                for name, start, rows in blocks(reader, plan, progress):
                    cast = rows.to(TORCH_DTYPES[target])
                    hashes.update(name, cast)
                    writer.write_rows(plan[name], start, cast)
            certificate = Certificate(shape, layout, target, source_dtype, hashes.digests())
            copy_side_files(hf_dir, folder, target)
            certificate.save(folder)
    return certificate


def megatron_to_hf(
    megatron_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = no_progress,
) -> Certificate:
    """Write a converted folder as Hugging Face shards with an index; the config and tokenizer come from ``hf_config``.

    Every tensor's bytes are checked against the folder's certificate on the way. Raises MismatchError naming the first
    that differs, ConversionError where ``hf_config`` describes another model; nothing is left behind.
    """
    with ShardedCheckpoint(megatron_dir) as source:
        side_files = Path(hf_config or megatron_dir)
        _require_same_model(source.shape, load_model_shape(side_files), side_files)
        target = dtype or source.certificate.dtype
        specs = {
            n: TensorSpec(dims, TORCH_DTYPES[target])
            for n, dims in hf_tensors(source.shape).items()
        }
        stored, written = TensorHashes(), TensorHashes()
        writer = ShardedWriter(
            out_dir, specs, max_shard_bytes=max_shard_bytes, side_files_from=_folder_of(side_files)
        )
        with writer, stored, written:
            for name, start, rows in blocks(source, specs, progress):
                stored.update(name, rows)
                cast = rows.to(TORCH_DTYPES[target])
                if target != source.certificate.dtype:
                    written.update(name, cast)
                writer.write_rows(name, start, cast)
            _require_recorded(source, stored.digests())
            same = target == source.certificate.dtype
            hashes = (stored if same else written).digests()
            certificate = Certificate(source.shape, None, target, source.certificate.dtype, hashes)
            certificate.save(writer.folder)
    return certificate


@dataclass(frozen=True)
class Verified:
    """What ``verify`` compared: all tensors, byte for byte."""

    tensors: int
    bytes: int


def verify(
    hf_dir: str | Path, megatron_dir: str | Path, *, progress: Progress = no_progress
) -> Verified:
    """Prove that a converted folder turns back into ``hf_dir`` byte by byte, and that its certificate is true.

    A conversion that cast is compared with the cast of the original. Raises MismatchError naming the
    first tensor, rank, file and offset that differs.
    """
    shape = load_model_shape(hf_dir)
    with SafetensorsReader(hf_dir) as original, ShardedCheckpoint(megatron_dir) as converted:
        original.check(shape)
        _require_same_model(converted.shape, shape, Path(hf_dir))
        hashes = TensorHashes()
        with hashes:
            for name, start, rows in blocks(converted, converted.specs, progress):
                expected = original.read_rows(name, start, len(rows)).to(converted.dtype)
                if byte_view(rows) != byte_view(expected):
                    raise MismatchError(_first_difference(converted, name, start, rows, expected))
                hashes.update(name, rows)
            _require_recorded(converted, hashes.digests())
        specs = converted.specs.values()
        return Verified(len(specs), sum(spec.bytes for spec in specs))


class TensorHashes:
    """SHA-256 of tensors that arrive in row blocks, tensor after tensor; computed in a thread, one block behind."""

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}
        self._pool = ThreadPoolExecutor(1, "hash")
        self._pending: Future | None = None

    def update(self, name: str, rows: torch.Tensor) -> None:
        """Add a block to ``name``'s hash; the tensor must not change afterwards."""
        self._wait()
        digest = self._hashes.setdefault(name, hashlib.sha256())
        self._pending = self._pool.submit(digest.update, byte_view(rows))

    def digests(self) -> dict[str, str]:
        """Hex digests, in the order in which the tensors came."""
        self._wait()
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def __enter__(self) -> TensorHashes:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown()


def blocks(
    store: TensorStore, names: Iterable[str], progress: Progress
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """``(name, first row, rows)`` of every tensor of ``names``, in order."""
    for name in names:
        for start, count in row_blocks(store.specs[name]):
            rows = store.read_rows(name, start, count)
            yield name, start, rows
            progress(rows.numel() * rows.dtype.itemsize)


def _require_recorded(source: ShardedCheckpoint, found: dict[str, str]) -> None:
    for name, digest in found.items():
        recorded = source.certificate.tensors[name]
        if digest != recorded:
            ranks = sorted({p.rank for t in source.plan if t.name == name for p in t.pieces})
            raise MismatchError(
                f"{source.folder}: {name} (ranks {ranks}) has SHA-256 {digest}, conversion.json recorded {recorded}"
            )


def _require_same_model(found: ModelShape, expected: ModelShape, where: Path) -> None:
    """The tensors must agree; the dtype that config.json names may differ."""
    if (found.family, hf_tensors(found)) != (expected.family, hf_tensors(expected)):
        names = [
            f"{k} {v!r} (config.json: {getattr(expected, k)!r})"
            for k, v in vars(found).items()
            if v != getattr(expected, k)
        ]
        raise CheckpointError(
            f"{where}: describes another model than was converted: {', '.join(names)}"
        )


def _first_difference(
    converted: ShardedCheckpoint, name: str, start: int, rows: torch.Tensor, expected: torch.Tensor
) -> str:
    kind = {2: torch.int16, 4: torch.int32}[rows.dtype.itemsize]
    differs = (rows.view(kind) != expected.view(kind)).reshape(-1)
    at = int(differs.nonzero()[0]) + start * (rows.numel() // len(rows))
    index: list[int] = []
    for size in reversed(converted.specs[name].shape):
        at, i = divmod(at, size)
        index.insert(0, i)
    rank, path, offset = converted.locate(name, index)
    place = tuple(i - (start if axis == 0 else 0) for axis, i in enumerate(index))
    return (
        f"{name}{index}: {rows[place].item()!r} in rank {rank}'s {path} at byte {offset}, "
        f"{expected[place].item()!r} in the original ({int(differs.sum())} elements of this block differ)"
    )


def _folder_of(config: Path) -> Path:
    return config if config.is_dir() else config.parent


def _model_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    return sum(dims.numel() for dims in hf_tensors(shape).values()) * dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
