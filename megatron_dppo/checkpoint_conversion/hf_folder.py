"""Read and write Hugging Face folders: safetensors shards with an index, read by slices and written atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion import tensor_store
from megatron_dppo.checkpoint_conversion.certificate import (
    TORCH_DTYPES,
    TRACKER,
    Certificate,
    side_files,
)
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import (
    language_model_values,
    packed_experts,
    with_language_model_values,
)
from megatron_dppo.model.mapping import hf_tensors, own_dtypes
from megatron_dppo.model.quantization import SCALE_SUFFIX, is_quantized
from megatron_dppo.model.rows import PackedExperts
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.model.weight_index import INDEX, read_weight_index
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import Closing, empty_folder, sync_folder, sync_to_disk
from megatron_dppo.system.groups import consecutive_groups

SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 10**9
SLACK_BYTES = 16 << 20
"""Room for headers, indices and side files."""


class StagedFolder:
    """``with StagedFolder(out, expected_bytes) as folder:`` yields a new folder, the staging folder. If the block ends
    without an error, the staging folder is renamed to ``out``; otherwise it is removed.

    The staging folder ``.<name>.partial`` is beside ``out``, on the same disk. This process locks it, and removes files
    that a killed process left in it. Raises CheckpointError if ``out`` exists and is not an empty folder, if the
    disk has less than ``expected_bytes`` free, or if another process is writing to the same folder.
    """

    def __init__(self, out: str | Path, expected_bytes: int) -> None:
        self.out = Path(out).absolute()
        self.folder = self.out.parent / f".{self.out.name}.partial"
        self._expected = expected_bytes
        self._lock = -1

    def __enter__(self) -> Path:
        self._require_out_is_free()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._lost_race() from None
        try:
            self._begin()
            failpoint("folder/begun")
        except BaseException:
            os.close(self._lock)
            raise
        return self.folder

    def _begin(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.out}: another process is writing it now") from None
        # Between mkdir and flock, another process may have renamed this folder to ``out``, or removed it. The lock is
        # then not on a staging folder.
        try:
            staged = self.folder.stat()
        except FileNotFoundError:
            raise self._lost_race() from None
        if not os.path.samestat(os.fstat(self._lock), staged):
            raise self._lost_race()
        empty_folder(self.folder)
        try:
            # Check again: another process may have renamed its folder to ``out`` before mkdir. From here on, only this
            # process can rename a folder to ``out``, because it holds the lock.
            self._require_out_is_free()
            free = shutil.disk_usage(self.folder).free
            if free < self._expected + SLACK_BYTES:
                raise CheckpointError(
                    f"{self.out}: needs {self._expected} bytes, its disk has {free} bytes free"
                )
        except CheckpointError:
            self.folder.rmdir()
            raise

    def _lost_race(self) -> CheckpointError:
        return CheckpointError(f"{self.out}: another process has just written it")

    def _require_out_is_free(self) -> None:
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CheckpointError(f"{self.out}: exists and is not an empty folder")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_renamed = False
        try:
            if kind is None:
                # Sync before the rename: otherwise the folder may have empty files after a power cut.
                sync_folder(self.folder)
                self._require_out_is_free()
                failpoint("folder/publish")
                os.rename(self.folder, self.out)
                is_renamed = True
                failpoint("folder/published")
                sync_to_disk(self.out.parent)
        finally:
            # After the rename, a staging folder of this name belongs to another process.
            if not is_renamed:
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)


def copy_side_files(
    source: str | Path, target: Path, dtype: str, quantization: Mapping[str, Any] | None = None
) -> None:
    """Copy ``side_files`` except Megatron's tracker: functions that write a Megatron checkpoint write a new tracker.

    config.json is copied byte for byte if its dtype is ``dtype``, it has no quantization, and ``quantization`` is None.
    Otherwise it is written again with ``dtype`` and ``quantization``.
    """
    for path in side_files(source):
        if path.name == TRACKER:
            continue
        shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text())
    entries = language_model_values(config)
    dtype_keys = [key for key in ("dtype", "torch_dtype") if key in entries] or ["dtype"]
    differs = any(str(entries.get(key)).removeprefix("torch.") != dtype for key in dtype_keys)
    if differs or config.get("quantization_config") is not None or quantization is not None:
        config.pop("quantization_config", None)
        config = with_language_model_values(config, dict.fromkeys(dtype_keys, dtype))
        if quantization is not None:
            config["quantization_config"] = dict(quantization)
        config_path.write_text(json.dumps(config, indent=2) + "\n")


_BUFFER = ".rotary_emb.inv_freq"
"""Suffix of the names of buffers. Their values follow from config.json, so transformers, SGLang and this module do not
read them."""
_PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
"""Names of packed tensors [experts, rows, columns]: transformers 5 packs all experts of a layer into them."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""Endings of the names of the two tensors that a quantised checkpoint has in place of a matrix."""


class SafetensorsReader(Closing):
    """The tensors of a Hugging Face folder, open for reading; a slice of rows is read without the rest of the tensor.

    Every shard's header is checked on opening. A missing, truncated or malformed file, and an index that disagrees with
    its shards, raise CheckpointError. A packed tensor has all experts of a layer; each matrix of each expert is read as
    one tensor. ``unusual_packed`` has the names of the packed tensors that were split although published files of the
    family have no packed tensors. Buffers that follow from config.json are left out.

    Args:
        hf_dir: the folder.
        splits_experts: whether packed tensors are read as a tensor for each matrix and expert.
    """

    def __init__(self, hf_dir: str | Path, *, splits_experts: bool = True) -> None:
        self.folder = Path(hf_dir)
        self.unusual_packed: list[str] = []
        self._files: list[tensor_store.SafetensorsFile] = []
        self._file_of: dict[str, tensor_store.SafetensorsFile] = {}
        try:
            self._open()
            if splits_experts:
                self._split_experts()
        except CheckpointError:
            self.close()
            raise
        buffer_names = [name for name in self._file_of if name.endswith(_BUFFER)]
        for name in buffer_names:
            del self._file_of[name]
        self.specs: dict[str, tensor_store.TensorSpec] = {}
        for name, file in self._file_of.items():
            entry = file.entries[name]
            self.specs[name] = tensor_store.TensorSpec(entry.shape, entry.dtype)

    def _open(self) -> None:
        index = self.folder / INDEX
        if not index.exists():
            _check_link(self.folder / SINGLE)
            if not (self.folder / SINGLE).exists():
                raise CheckpointError(f"{self.folder}: has neither {INDEX} nor {SINGLE}")
            self._add(self.folder / SINGLE)
            return
        weight_map = read_weight_index(index)
        for name in sorted(set(weight_map.values())):
            _check_link(self.folder / name)
            if not (self.folder / name).exists():
                raise CheckpointError(f"{index}: names {name}, which is not in the folder")
            self._add(self.folder / name)
        for tensor, name in weight_map.items():
            file = self._file_of.get(tensor)
            if file is None or file.path.name != name:
                fact = "no shard has it"
                if file is not None:
                    fact = f"it is in {file.path.name}"
                raise CheckpointError(f"{index}: places {tensor} in {name}, but {fact}")
        unlisted = sorted(set(self._file_of) - set(weight_map))
        if unlisted:
            raise CheckpointError(
                f"{index}: does not list {unlisted[0]} (and {len(unlisted) - 1} more)"
            )

    def _add(self, path: Path) -> None:
        file = tensor_store.SafetensorsFile(path)
        self._files.append(file)
        for name in file.entries:
            if name in self._file_of:
                raise CheckpointError(
                    f"{name} is in both {self._file_of[name].path.name} and {path.name}"
                )
            self._file_of[name] = file

    def _split_experts(self) -> None:
        family_tensors = packed_experts(self.folder)
        for name, file in list(self._file_of.items()):
            if family_tensors:
                templates, is_transposed = _family_templates(name, family_tensors)
            else:
                templates = _transformers_templates(name)
                is_transposed = False
            shape = file.entries[name].shape
            # A tensor of a wrong shape stays whole, so that ``check`` reports its name.
            if not templates or len(shape) < 2 or shape[1] % len(templates):
                continue
            if is_transposed and len(shape) != 3:
                continue
            # From here on ``file`` has the parts instead of the packed tensor.
            del self._file_of[name]
            packed = file.entries.pop(name)
            parts = _parts_of(packed, templates, is_transposed=is_transposed)
            duplicates = sorted(parts.keys() & self._file_of.keys())
            if duplicates:
                raise CheckpointError(f"{self.folder}: {duplicates[0]} is also in {name}")
            file.entries.update(parts)
            self._file_of.update(dict.fromkeys(parts, file))
            if not family_tensors:
                self.unusual_packed.append(name)

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read rows ``start .. start + count`` of dim 0."""
        return self._file_of[name].read_rows(name, start, count)

    def read(
        self, name: str, dim: int = 0, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """Read ``tensor.narrow(dim, start, length)``, contiguous; without a length, to the end."""
        return tensor_store.read_slice(self, name, dim, start, length)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []


def _transformers_templates(name: str) -> list[str]:
    """Return the name templates of an expert's matrices in a tensor that transformers 5 packs; else an empty list."""
    match = _PACKED.fullmatch(name)
    if match is None:
        return []
    matrices = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    return [f"{match[1]}.{{expert}}.{matrix}.weight" for matrix in matrices]


def _family_templates(name: str, family_tensors: Sequence[PackedExperts]) -> tuple[list[str], bool]:
    """Return the name templates of an expert's matrices in the packed tensor ``name`` of the model family, and whether
    the matrices are transposed in it. If ``name`` is no packed tensor, return no template."""
    for packed in family_tensors:
        pattern = re.escape(packed.name).replace(r"\{layer\}", r"(\d+)")
        match = re.fullmatch(f"{pattern}({MXFP4_BLOCKS}|{MXFP4_SCALES})?", name)
        if match is not None:
            ending = match[2] or ""
            matrices = [matrix.replace("{layer}", match[1]) + ending for matrix in packed.matrices]
            # A block of MXFP4 has elements of one row, so an MXFP4 tensor is never transposed.
            return matrices, packed.is_transposed and not ending
    return [], False


def _parts_of(
    packed: tensor_store.Entry, templates: Sequence[str], *, is_transposed: bool
) -> dict[str, tensor_store.Entry]:
    """Return the position of each matrix of each expert in a packed tensor.

    Experts follow each other. An expert's matrices follow each other (gate_proj, then up_proj). A matrix consists of
    whole rows of the packed tensor. With ``is_transposed``, these rows are the columns of the matrix.
    """
    experts, rows, *widths = packed.shape
    dims = (rows // len(templates), *widths)
    if is_transposed:
        dims = dims[::-1]
    size = packed.dtype.itemsize * math.prod(dims)
    parts: dict[str, tensor_store.Entry] = {}
    offset = packed.offset
    for expert in range(experts):
        for template in templates:
            name = template.format(expert=expert)
            parts[name] = tensor_store.Entry(
                dims, packed.dtype, offset=offset, is_transposed=is_transposed
            )
            offset += size
    return parts


class ShardedWriter:
    """Writes a Hugging Face folder atomically. The tensors are known before; their rows can be written in any order.

    Tensors fill shards of at most ``max_shard_bytes`` in the order of ``tensors``; a larger tensor gets its own shard.
    The folder is staged next to ``out_dir`` and renamed if the ``with`` block ends without an error. ``out_dir`` must
    not exist, or be empty. Raises CheckpointError if a tensor has more or fewer rows than were written.
    """

    def __init__(
        self,
        out_dir: str | Path,
        tensors: Mapping[str, tensor_store.TensorSpec],
        *,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        side_files_from: str | Path | None = None,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = dict(tensors)
        self._side_files_from = side_files_from
        self._quantization = quantization
        self._certificate: Certificate | None = None
        self._rows_left = {name: spec.shape[0] for name, spec in tensors.items()}
        self._staged = StagedFolder(out_dir, sum(spec.bytes for spec in tensors.values()))
        self._files = plan_files(self._tensors, max_shard_bytes)
        self._writer_of: dict[str, tensor_store.SafetensorsFileWriter] = {}

    def __enter__(self) -> ShardedWriter:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._staged)
            for file, specs in self._files.items():
                writer = stack.enter_context(
                    tensor_store.SafetensorsFileWriter(folder / file, specs)
                )
                self._writer_of.update(dict.fromkeys(specs, writer))
            self._stack = stack.pop_all()
        return self

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write rows of a tensor, cast to the announced dtype. Every row must be written once."""
        if name not in self._tensors:
            raise ValueError(f"{name} was not announced to this writer")
        data = rows.detach().to("cpu", self._tensors[name].dtype)
        self._writer_of[name].write_rows(name, start, data)
        self._rows_left[name] -= len(rows)

    def certify(self, certificate: Certificate) -> None:
        """Write ``certificate`` at the end of the ``with`` block, after all other files."""
        self._certificate = certificate

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *details)
            return
        with self._stack:
            self._finish()

    def _finish(self) -> None:
        wrong_names = [name for name, rows in self._rows_left.items() if rows]
        if wrong_names:
            raise CheckpointError(
                f"{len(wrong_names)} tensors were not written with every row once, first {wrong_names[0]}"
            )
        complete_folder(self._staged.folder, self._files, self._side_files_from, self._quantization)
        if self._certificate is not None:
            self._certificate.save(self._staged.folder)


def write_hf_checkpoint(
    out_dir: str | Path,
    shape: ModelShape,
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    side_files_from: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a whole model from a stream of ``(name, tensor)``, with config and tokenizer of ``side_files_from``."""
    specs = trained_specs(shape, dtype)
    with ShardedWriter(
        out_dir, specs, max_shard_bytes=max_shard_bytes, side_files_from=side_files_from
    ) as writer:
        for name, tensor in tensors:
            writer.write_rows(name, 0, tensor)


def trained_specs(shape: ModelShape, dtype: torch.dtype) -> dict[str, tensor_store.TensorSpec]:
    """Return the tensors of a model that is trained in ``dtype``. If the trainer always keeps a tensor in another type
    (``own_dtypes``), the tensor has that type here too."""
    fixed_dtypes = own_dtypes(shape)
    specs: dict[str, tensor_store.TensorSpec] = {}
    for name, dims in hf_tensors(shape).items():
        tensor_dtype = dtype
        if name in fixed_dtypes:
            tensor_dtype = TORCH_DTYPES[fixed_dtypes[name]]
        specs[name] = tensor_store.TensorSpec(dims, tensor_dtype)
    return tensor_store.packed_specs(shape, specs)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of ``folder`` that SGLang's loader reads.

    With an index, they are the files of the index. A file that the index does not name is a copy of the weights
    (Mistral's ``consolidated.safetensors``), or is left from an earlier checkpoint. Without an index, they are all
    safetensors files, except such a copy. Raises CheckpointError for a damaged index, and for a link to no file.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / name for name in read_weight_index(index).values()})
    # consolidated.safetensors is a copy of the single file, with other names of tensors. SGLang does not read the copy.
    elif [path.name for path in files] == ["consolidated.safetensors", SINGLE]:
        files = files[1:]
    for path in files:
        _check_link(path)
    return files


def _check_link(path: Path) -> None:
    """Raise CheckpointError if ``path`` is a link to no file, as in a copy of the hub's cache without its blobs."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path}: links to {path.readlink()}, which does not exist; download the model again, or copy it with "
            "the files that its links name (cp -L)"
        )


def plan_files(
    tensors: Mapping[str, tensor_store.TensorSpec], max_shard_bytes: int
) -> dict[str, dict[str, tensor_store.TensorSpec]]:
    """Divide ``tensors`` among weight files: file name -> the tensors of the file.

    Files follow the order of ``tensors``. A file has at most ``max_shard_bytes``; a larger tensor gets its own file.
    All parts of a packed tensor are in one file, at the position of their first part.
    """

    def bytes_of(part_names: Sequence[str]) -> int:
        return sum(tensors[name].bytes for name in part_names)

    # Name of a tensor in a file -> the names of its parts. A tensor that is not packed is its own only part.
    part_names_of = tensor_store.part_names_of_file_tensors(tensors)
    shards: list[dict[str, tensor_store.TensorSpec]] = []
    for group in consecutive_groups(part_names_of.values(), bytes_of, max_shard_bytes):
        shards.append({name: tensors[name] for name in chain(*group)})
    count = len(shards)
    if count == 1:
        return {SINGLE: shards[0]}
    names = (f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    return dict(zip(names, shards, strict=True))


def complete_folder(
    folder: Path,
    files: Mapping[str, Mapping[str, tensor_store.TensorSpec]],
    side_files_from: str | Path | None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write everything but the weights: an index if there are several weight files, and copies of the files in
    ``side_files_from``.

    ``files``: the result of ``plan_files``. ``quantization``: the ``quantization_config`` for the copy of
    config.json; None: the weights are not quantised.
    """
    specs: dict[str, tensor_store.TensorSpec] = {}
    file_of: dict[str, str] = {}
    for file, tensors in files.items():
        specs |= tensors
        file_of |= dict.fromkeys(tensor_store.part_names_of_file_tensors(tensors), file)
    if len(files) > 1:
        weight_map = {name: file_of[name] for name in sorted(file_of)}
        total = sum(spec.bytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if side_files_from is not None:
        # config.json has one dtype, but a few tensors may have another dtype. Write the dtype with most bytes among the
        # tensors that are not quantised.
        bytes_of_dtype = Counter[torch.dtype]()
        for name, spec in specs.items():
            is_of_quantized_matrix = is_quantized(name) or name.endswith(SCALE_SUFFIX)
            if quantization is None or not is_of_quantized_matrix:
                bytes_of_dtype[spec.dtype] += spec.bytes
        ((dtype, _),) = bytes_of_dtype.most_common(1)
        dtype_name = str(dtype).removeprefix("torch.")
        copy_side_files(side_files_from, folder, dtype_name, quantization)
