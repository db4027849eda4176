"""Read Megatron-Core's distributed checkpoints (``torch_dist``) by rows and without Megatron.

These checkpoints are torch.distributed.checkpoint folders with the tensors of the whole model. Layers are stacked along
a first axis, experts along a second axis. So every layout can load a folder. Parameters in this module have the names
and shapes of a single-rank layout. ``open_checkpoint`` opens ``torch_dist`` folders and Hugging Face folders, both as
Hugging Face tensors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from megatron_dppo.checkpoint_conversion import tensor_store
from megatron_dppo.checkpoint_conversion.certificate import (
    CERTIFICATE,
    TRACKER,
    Certificate,
    TensorHashes,
    load_certificate,
    source_certificate,
)
from megatron_dppo.checkpoint_conversion.dist_reading import Box, StoredBlocks, StoredTensor
from megatron_dppo.checkpoint_conversion.hf_folder import SINGLE, SafetensorsReader
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import family_of, layers_are_alike, load_model_shape
from megatron_dppo.model.gather_plan import Piece, TensorSources, gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import (
    carried_names,
    file_dtypes,
    hf_tensors,
    local_parameters,
    stepped,
)
from megatron_dppo.model.rows import no_tensor
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.files import Closing

CARRIED = "carried"
"""Subfolder with the carried tensors, which are no part of the model and are only copied (``Family.carries``)."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of the names of the model's tensors. Other tensors are the optimizer's."""
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


@dataclass(frozen=True)
class StackedParameter:
    """``tensor[index]`` of the checkpoint's tensor ``key`` is one parameter of a single-rank layout."""

    key: str
    index: tuple[int, ...]


def stacked_parameters(name: str) -> list[StackedParameter]:
    """Return the possible positions of a single-rank parameter: stacked over layers (Megatron-Core's default), or in a
    tensor for each layer."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return [StackedParameter(name, ())]
    number = int(layer[1])
    local_name = layer[2]
    expert = _EXPERT.fullmatch(local_name)
    index: tuple[int, ...] = ()
    if expert is not None:
        local_name = f"mlp.experts.experts.{expert[1]}.{expert[2]}"
        index = (int(expert[3]),)
    return [
        StackedParameter(f"decoder.layers.{local_name}", (number, *index)),
        StackedParameter(f"decoder.layers.{number}.{local_name}", index),
    ]


def written_parameter(shape: ModelShape, name: str) -> StackedParameter:
    """Return the position at which Megatron-Core and this package write a single-rank parameter: stacked over layers if
    all layers have the same parameters, else in a tensor for each layer."""
    candidates = stacked_parameters(name)
    if layers_are_alike(shape):
        return candidates[0]
    return candidates[-1]


def stack_sizes(shape: ModelShape, parameter: StackedParameter) -> tuple[int, ...]:
    """Sizes of the axes of ``parameter.index``: layers and experts, or experts alone."""
    sizes: tuple[int, ...] = (shape.num_layers, shape.num_experts)
    if not layers_are_alike(shape):
        sizes = sizes[1:]
    return sizes[: len(parameter.index)]


class TorchDistFolder(Closing):
    """Row access to the tensors of a ``torch_dist`` folder. Raises CheckpointError for another or a damaged folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stored = StoredBlocks(folder)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a single-rank parameter."""
        _, tensor = self._find(name)
        return tensor.dtype

    def dims(self, name: str) -> tuple[int, ...]:
        """Return the shape of a single-rank parameter. A padded vocabulary may have more rows than the model."""
        parameter, tensor = self._find(name)
        return tensor.dims[len(parameter.index) :]

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read rows ``start .. start + count`` of a single-rank parameter."""
        parameter, tensor = self._find(name)
        lead = len(parameter.index)
        widths = tensor.dims[lead + 1 :]
        sizes = (*(1 for _ in parameter.index), count, *widths)
        out = torch.empty(sizes, dtype=tensor.dtype)
        box = Box((*parameter.index, start, *(0 for _ in widths)), sizes)
        self._stored.read(parameter.key, box, out)
        return out.view(count, *widths)

    def locate(self, name: str, index: Sequence[int]) -> tuple[Path, int]:
        """Return the file and byte offset of an element of a single-rank parameter."""
        parameter, _ = self._find(name)
        return self._stored.locate(parameter.key, (*parameter.index, *index))

    def check_nothing_else(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if the folder has another model parameter than the single-rank parameters ``names``.

        Optimizer states and Transformer Engine's extra states do not count.
        """
        # Key of a tensor -> the sizes of its leading axes (layers, experts) in a model with ``names``. Each size is the
        # largest index among ``names``, plus 1.
        stack_sizes_of: dict[str, tuple[int, ...]] = {}
        for name in names:
            parameter, _ = self._find(name)
            ends = tuple(i + 1 for i in parameter.index)
            sizes = stack_sizes_of.get(parameter.key, ends)
            stack_sizes_of[parameter.key] = tuple(map(max, sizes, ends))
        for key, tensor in self._stored.tensors.items():
            if not key.startswith(_MODEL_PREFIXES) or "_extra_state" in key:
                continue
            if key not in stack_sizes_of:
                raise CheckpointError(f"{self.folder}: {key} is no tensor of config.json's model")
            model_sizes = stack_sizes_of[key]
            if tensor.dims[: len(model_sizes)] != model_sizes:
                raise CheckpointError(
                    f"{self.folder}: {key} of shape {tensor.dims} holds more layers or experts than "
                    f"config.json's model, {model_sizes}"
                )

    def _find(self, name: str) -> tuple[StackedParameter, StoredTensor]:
        candidates = stacked_parameters(name)
        for parameter in candidates:
            tensor = self._stored.tensors.get(parameter.key)
            if tensor is not None:
                if any(i >= n for i, n in zip(parameter.index, tensor.dims, strict=False)):
                    raise CheckpointError(
                        f"{self.folder}: {parameter.key} of shape {tensor.dims} has no {parameter.index}"
                    )
                return parameter, tensor
        raise CheckpointError(
            f"{self.folder}: has no tensor {' or '.join(p.key for p in candidates)}"
        )

    def close(self) -> None:
        self._stored.close()


def find_torch_dist(folder: str | Path) -> Path | None:
    """Find the folder with ``.metadata``: ``folder`` itself, or the iteration that its Megatron-LM tracker names.

    Returns None if there is neither. Raises CheckpointError if the iteration's folder has no ``.metadata``.
    """
    folder = Path(folder)
    if (folder / ".metadata").exists():
        return folder
    if not (folder / TRACKER).exists():
        return None
    iteration = (folder / TRACKER).read_text().strip()
    folder_name = iteration
    if iteration != "release":
        folder_name = f"iter_{iteration:0>7}"
    iteration_folder = folder / folder_name
    if not (iteration_folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder / TRACKER}: names {iteration}, but {iteration_folder} holds no torch_dist checkpoint"
        )
    return iteration_folder


class TorchDistCheckpoint(Closing):
    """A ``torch_dist`` folder with a model of ``shape``. Raises CheckpointError if it has another model.

    A converted folder has a ``certificate``, and the tensors that the family carries along. A checkpoint of a training
    run has neither. Its carried tensors are read from the Hugging Face folder ``carried_from``, if that folder has
    weights.
    """

    def __init__(
        self, folder: str | Path, shape: ModelShape, carried_from: Path | None = None
    ) -> None:
        self.folder = Path(folder)
        self.shape = shape
        self.certificate: Certificate | None = None
        if (self.folder / CERTIFICATE).exists():
            self.certificate = load_certificate(self.folder)
            _check_same_model(self.certificate.shape, shape, self.folder)
        checkpoint_folder = find_torch_dist(folder)
        if checkpoint_folder is None:
            raise CheckpointError(
                f"{folder}: holds neither .metadata nor {TRACKER}; not a torch_dist checkpoint"
            )
        self._tensors = TorchDistFolder(checkpoint_folder)
        self._carried: SafetensorsReader | None = None
        try:
            self.dtype = self._check()
        except CheckpointError:
            self.close()
            raise
        self.specs: dict[str, TensorSpec] = {}
        for name, dims in hf_tensors(shape).items():
            self.specs[name] = TensorSpec(dims, self._own_dtypes.get(name, self.dtype))
        self._carried = _open_carried(checkpoint_folder, shape, carried_from)
        self._carried_names: list[str] = []
        if self._carried is not None:
            self._carried_names = carried_names(shape, self._carried.specs)
            self.specs |= {name: self._carried.specs[name] for name in self._carried_names}
        recorded_names = [] if self.certificate is None else list(self.certificate.tensors)
        lost_names = [name for name in recorded_names if name not in self.specs]
        if lost_names:
            self.close()
            raise MismatchError(
                f"{self.folder}: has no {lost_names[0]}, which {CERTIFICATE} recorded"
            )

    def _check(self) -> torch.dtype:
        """Check that the folder has exactly the model's parameters, with the model's shapes and one dtype, and return
        the dtype. The vocabulary may be padded. Tensors of ``mapping.file_dtypes`` may have any dtype; ``_own_dtypes``
        records it."""
        dtypes = set()
        own_names = file_dtypes(self.shape).keys()
        self._own_dtypes: dict[str, torch.dtype] = {}
        vocabulary = family_of(self.shape).vocabulary_tensors
        parameters = list(local_parameters(self.shape, Layout(), 0))
        for p in parameters:
            dtype = self._tensors.dtype(p.name)
            sources = {s.hf_name for s in p.segments}
            if sources <= own_names:
                self._own_dtypes |= dict.fromkeys(sources, dtype)
            else:
                dtypes.add(dtype)
            rows, *widths = self._tensors.dims(p.name)
            # A vocabulary is padded to a multiple of the run's tensor-parallel size.
            is_padded = p.segments[0].hf_name in vocabulary and rows > p.shape[0]
            has_all_rows = rows == p.shape[0] or is_padded
            if tuple(widths) != p.shape[1:] or not has_all_rows:
                raise CheckpointError(
                    f"{self.folder}: {p.name} has shape {(rows, *widths)}, config.json says {p.shape}"
                )
        self._tensors.check_nothing_else(p.name for p in parameters)
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{self.folder}: tensors of several dtypes, {sorted(map(str, dtypes))}"
            )
        return dtypes.pop()

    @cached_property
    def _sources(self) -> dict[str, TensorSources]:
        """Every Hugging Face tensor by name, with the single-rank parameters that its rows are read from."""
        return {tensor.name: tensor for tensor in gather_plan(self.shape, Layout())}

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Rows ``start .. start + count`` of a Hugging Face tensor."""

        def read(piece: Piece, row: int, rows: int) -> torch.Tensor:
            return self._tensors.read_rows(piece.name, row, rows)

        if self._carried is not None and name in self._carried_names:
            return self._carried.read_rows(name, start, count)
        dtype = self.specs[name].dtype
        return assemble_rows(self._sources[name], start, count, dtype, read)

    def locate(self, name: str, index: Sequence[int]) -> str:
        """Describe the file and byte offset of an element of a Hugging Face tensor."""
        if self._carried is not None and name in self._carried_names:
            return f"{name} of {self._carried.folder}"
        for piece in self._sources[name].pieces:
            s = piece.segment
            first, count = s.within(index[s.dim], 1)
            if count > 0:
                local = list(index)
                local[s.dim] = s.local_start + first
                path, byte = self._tensors.locate(piece.name, local)
                return f"{path} at byte {byte}"
        raise ValueError(f"{name} has no element {tuple(index)}")

    def close(self) -> None:
        self._tensors.close()
        if self._carried is not None:
            self._carried.close()


def _open_carried(
    checkpoint_folder: Path, shape: ModelShape, carried_from: Path | None
) -> SafetensorsReader | None:
    """Open the files of the tensors that a checkpoint of ``shape`` carries along; None if there are none."""
    if family_of(shape).carries is no_tensor:
        return None
    if (checkpoint_folder / CARRIED / SINGLE).exists():
        return SafetensorsReader(checkpoint_folder / CARRIED, splits_experts=False)
    if carried_from is not None and any(carried_from.glob("*.safetensors")):
        return SafetensorsReader(carried_from)
    return None


def _check_same_model(stored: ModelShape, shape: ModelShape, folder: Path) -> None:
    if (stored.family, hf_tensors(stored)) != (shape.family, hf_tensors(shape)):
        differences: list[str] = []
        for name, value in vars(stored).items():
            config_value = getattr(shape, name)
            if value != config_value:
                differences.append(f"{name} {value!r} (config.json: {config_value!r})")
        raise CheckpointError(
            f"{folder}: is of another model than config.json's: {', '.join(differences)}"
        )


def assemble_rows(
    tensor: TensorSources,
    start: int,
    count: int,
    dtype: torch.dtype,
    read: Callable[[Piece, int, int], torch.Tensor],
) -> torch.Tensor:
    """Assemble rows ``start .. start + count`` of a Hugging Face tensor. ``read(piece, row, rows)`` reads rows of a
    parameter."""
    out = torch.empty((count, *tensor.shape[1:]), dtype=dtype)
    for piece in tensor.pieces:
        overlap = rows_of_piece(piece, start, count)
        if overlap is not None:
            local_row, hf_row, length = overlap
            segment = piece.segment
            if segment.dim == 0:
                block = stepped(out, 0, hf_row - start, length, segment.hf_step)
            else:
                block = out.narrow(0, hf_row - start, length)
                block = block.narrow(1, segment.hf_start, segment.length)
            block.copy_(read(piece, local_row, length))
    return out


def rows_of_piece(piece: Piece, start: int, count: int) -> tuple[int, int, int] | None:
    """Return ``(local row, Hugging Face row, rows)`` of a piece's rows among the rows ``start .. start + count`` of its
    Hugging Face tensor; None if the piece has no such rows.

    A piece along dim 1 is a block of columns with all rows. The piece is as wide as the local parameter, so its rows
    are contiguous in the parameter.
    """
    s = piece.segment
    if s.dim == 1:
        assert s.length == piece.local_shape[1], (
            f"{piece.name}: a column block narrower than its shard"
        )
        return start, start, count
    first, rows = s.within(start, count)
    if rows <= 0:
        return None
    return s.local_start + first, s.hf_start + first * s.hf_step, rows


class FolderStore(tensor_store.TensorStore, Protocol):
    """The tensors of a folder whose files are open."""

    @property
    def folder(self) -> Path:
        """The folder of the tensors."""

    def close(self) -> None:
        """Close the files."""


class CheckedReader(Closing):
    """Slices of Hugging Face tensors. The first read of a tensor compares its SHA-256 with the certificate.

    Without a certificate (a folder that was not converted by this package) nothing is compared.
    """

    def __init__(self, store: FolderStore, certificate: Certificate | None) -> None:
        self._store = store
        self._certificate = certificate
        self._checked: set[str] = set()
        self._hashes = TensorHashes()

    @property
    def specs(self) -> Mapping[str, tensor_store.TensorSpec]:
        """Shape and dtype of every tensor."""
        return self._store.specs

    def check(self, shape: ModelShape) -> None:
        """Raise CheckpointError if a tensor is missing, unknown, or of another shape than in ``shape``'s tables.

        Also raises CheckpointError if a tied model stores an output layer that differs from its embedding, or if a
        tensor packs all experts of a layer although the family's files have no packed tensors: SGLang leaves out such a
        tensor without a message.
        """
        if isinstance(self._store, SafetensorsReader) and self._store.unusual_packed:
            packed_name = self._store.unusual_packed[0]
            raise CheckpointError(
                f"{self._store.folder}: {packed_name} holds all experts of a layer, expected a tensor for "
                "each matrix and expert: `megatron-dppo convert hf-to-megatron`, then `convert megatron-to-hf`, makes "
                "such a folder"
            )
        tensor_store.check_tensors(self.specs, shape, str(self._store.folder))
        tensor_store.check_tied_copy(self._store, shape, str(self._store.folder))

    def read(
        self, name: str, dim: int = 0, start: int = 0, length: int | None = None
    ) -> torch.Tensor:
        """Read ``tensor.narrow(dim, start, length)``, contiguous. Raises MismatchError if the tensor was altered."""
        self._compare(name)
        return tensor_store.read_slice(self._store, name, dim, start, length)

    def read_rows(self, name: str, start: int, count: int) -> torch.Tensor:
        """Read rows ``start .. start + count`` of dim 0. Raises MismatchError if the tensor was altered."""
        self._compare(name)
        return self._store.read_rows(name, start, count)

    def _compare(self, name: str) -> None:
        if self._certificate is not None and name not in self._checked:
            # Read the whole tensor, although a rank needs a slice: the recorded hash is of all rows.
            digest = self._hashes.add(self._store, name)
            self._certificate.check_tensor(name, digest, self._store.folder)
            self._checked.add(name)

    def close(self) -> None:
        self._hashes.close()
        self._store.close()


def open_checkpoint(folder: str | Path) -> CheckedReader:
    """Open a Hugging Face folder, or a result of ``hf_to_megatron``. Raises CheckpointError for other folders."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if not (folder / CERTIFICATE).exists():
        return CheckedReader(SafetensorsReader(folder), None)
    certificate = load_certificate(folder)
    if certificate.form == "huggingface":
        return CheckedReader(SafetensorsReader(folder), certificate)
    return CheckedReader(TorchDistCheckpoint(folder, certificate.shape), certificate)


@contextmanager
def open_source(hf_dir: str | Path) -> Iterator[tuple[ModelShape, CheckedReader]]:
    """Open a Hugging Face folder whose weights a conversion rewrites; yield the model's shape and its tensors.

    Raises ModelError unless the tensors are those of config.json, with one dtype, and not of 8 or 4 bits. If the folder
    has a certificate, reads raise MismatchError for a tensor that was altered since.
    """
    shape = load_model_shape(hf_dir)
    with CheckedReader(SafetensorsReader(hf_dir), source_certificate(hf_dir)) as reader:
        tensor_store.check_tensors(reader.specs, shape, str(hf_dir))
        tensor_store.check_dtypes(reader, shape, str(hf_dir))
        tensor_store.check_tied_copy(reader, shape, str(hf_dir))
        yield shape, reader


def tensor_digests(folder: str | Path, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Return name -> SHA-256 (hex) of the folder's tensors at the positions ``part``, ``part + parts``, ... by name."""
    with open_checkpoint(folder) as reader, TensorHashes() as hashes:
        for name in sorted(reader.specs)[part::parts]:
            for start, count in tensor_store.row_blocks(reader.specs[name]):
                hashes.update(name, reader.read(name, 0, start, count))
        return hashes.digests()


def combined_digest(digests: Iterable[dict[str, str]]) -> str:
    """Return the SHA-256 (hex) of the sorted lines ``name digest`` of ``digests``, results of ``tensor_digests``."""
    lines: list[str] = []
    for part_digests in digests:
        lines += [f"{name} {digest}\n" for name, digest in part_digests.items()]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
