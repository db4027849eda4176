"""Conversion of whole checkpoints block by block, with memory for a few blocks at any model size.

Every Hugging Face tensor is read once and written once, in row blocks of BLOCK_BYTES, while a second thread hashes it.
Outputs are staged and renamed. So an interrupted conversion leaves no folder that can be loaded, and the next
conversion starts from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store
from megatron_dppo.checkpoint_conversion.certificate import (
    TORCH_DTYPES,
    TRACKER,
    Certificate,
    TensorHashes,
    other_dtypes,
    source_certificate,
)
from megatron_dppo.checkpoint_conversion.dist_writing import write_torch_dist
from megatron_dppo.checkpoint_conversion.torch_dist import CARRIED, TorchDistCheckpoint
from megatron_dppo.convert.quantized import open_model
from megatron_dppo.model.errors import MismatchError
from megatron_dppo.model.families import load_stored_shape
from megatron_dppo.model.hub_download import check_downloaded_files
from megatron_dppo.model.mapping import carried_names, file_dtypes, hf_tensors, parameter_count
from megatron_dppo.model.shape import ITEM_BYTES, ModelShape

Progress = Callable[[int], None]
"""Called with the bytes read since the last call."""


def no_progress(count: int) -> None:
    """Report no progress."""


def hf_to_megatron(
    hf_dir: str | Path,
    out_dir: str | Path,
    *,
    dtype: str | None = None,
    progress: Progress = no_progress,
) -> Certificate:
    """Write ``hf_dir`` as a Megatron-Core distributed checkpoint with a certificate. Every layout can load it.

    Megatron-LM's ``--load`` accepts ``out_dir``: the tracker in it names the folder ``release``. ``dtype`` is the dtype
    of the result. None: the stored dtype, and all stored tensors must have one dtype. Raises ModelError for invalid
    input, and then leaves no files.
    """
    check_downloaded_files(path for path in Path(hf_dir).iterdir() if path.is_file())
    with open_model(hf_dir) as (shape, reader):
        certificate = source_certificate(hf_dir)
        if dtype is None:
            tensor_store.check_dtypes(reader, shape, str(hf_dir))
        return write_megatron(
            reader, shape, hf_dir, out_dir, dtype=dtype, progress=progress, recorded=certificate
        )


def write_megatron(
    source: tensor_store.TensorStore,
    shape: ModelShape,
    side_files_from: str | Path,
    out_dir: str | Path,
    *,
    dtype: str | None,
    progress: Progress,
    recorded: Certificate | None = None,
) -> Certificate:
    """Write the tensors of ``source`` as ``hf_to_megatron`` does. The caller has checked that the tensors fit.

    ``recorded``: the certificate of ``source``. The hash of every tensor is compared with it. None: no comparison.
    """
    source_dtype, target = _dtypes(source, shape, dtype)
    dtypes = _target_dtypes(source, shape, target)
    stored = TensorHashes()
    written = TensorHashes()
    # The source's certificate has hashes of the stored bytes, the new certificate has hashes of the written bytes. A
    # cast changes the bytes, so hash both.
    hashes_both = recorded is not None and target != source_dtype

    def read(name: str, start: int, count: int) -> torch.Tensor:
        rows = source.read_rows(name, start, count)
        progress(count * source.specs[name].row_bytes)
        if hashes_both:
            stored.update(name, rows)
        cast = _finite_cast(rows, name, start, dtypes[name], side_files_from)
        written.update(name, cast)
        return cast

    staged = hf_folder.StagedFolder(out_dir, parameter_count(shape) * ITEM_BYTES[target])
    with staged as folder, stored, written:
        (folder / "release").mkdir()
        write_torch_dist(folder / "release", shape, dtypes, read)
        carried = carried_names(shape, source.specs)
        if carried:
            specs = {n: tensor_store.TensorSpec(source.specs[n].shape, dtypes[n]) for n in carried}
            path = folder / "release" / CARRIED / hf_folder.SINGLE
            path.parent.mkdir()
            with tensor_store.SafetensorsFileWriter(path, specs) as writer:
                for name in carried:
                    for start, count in tensor_store.row_blocks(source.specs[name]):
                        writer.write_rows(name, start, read(name, start, count))
        (folder / TRACKER).write_text("release")
        digests = written.digests()
        stored_digests = stored.digests() if hashes_both else digests
        if recorded is not None:
            for name, digest in stored_digests.items():
                recorded.check_tensor(name, digest, Path(side_files_from))
        # Tensors arrive in Megatron's order; a certificate lists them in Hugging Face's order.
        ordered = {name: digests[name] for name in (*hf_tensors(shape), *carried)}
        certificate = Certificate(
            "torch_dist", shape, target, source_dtype, ordered, dtypes=other_dtypes(dtypes, target)
        )
        hf_folder.copy_side_files(side_files_from, folder, target)
        certificate.save(folder)
    return certificate


def megatron_to_hf(
    megatron_dir: str | Path,
    out_dir: str | Path,
    *,
    hf_config: str | Path | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = hf_folder.DEFAULT_SHARD_BYTES,
    progress: Progress = no_progress,
) -> Certificate:
    """Write a Megatron checkpoint as Hugging Face shards with an index.

    Config and tokenizer come from ``hf_config``; if ``hf_config`` is None, they come from ``megatron_dir``.

    ``megatron_dir`` is a result of ``hf_to_megatron``, or a checkpoint of a training run. If the folder has a
    certificate, every tensor is compared with the certificate. Raises MismatchError for the first tensor that differs,
    and ModelError if ``hf_config`` describes another model; then no files are left.
    """
    side_files = Path(hf_config or megatron_dir)
    shape = load_stored_shape(side_files)
    side_folder = side_files if side_files.is_dir() else side_files.parent
    with TorchDistCheckpoint(megatron_dir, shape, side_folder) as source:
        source_dtype, target = _dtypes(source, shape, dtype)
        dtypes = _target_dtypes(source, shape, target)
        specs: dict[str, tensor_store.TensorSpec] = {}
        for name, spec in source.specs.items():
            specs[name] = tensor_store.TensorSpec(spec.shape, dtypes[name])
        # Names and order stay the same: the writer also learns which tensors become parts of a packed tensor.
        specs = tensor_store.packed_specs(shape, specs)
        stored = TensorHashes()
        written = TensorHashes()
        writer = hf_folder.ShardedWriter(
            out_dir, specs, max_shard_bytes=max_shard_bytes, side_files_from=side_folder
        )
        with writer, stored, written:
            for name, start, rows in blocks(source, specs, progress):
                stored.update(name, rows)
                cast = _finite_cast(rows, name, start, dtypes[name], megatron_dir)
                # ``stored`` is compared with the source's certificate, ``written`` is for the new certificate. Without
                # a cast both are equal.
                if target != source_dtype:
                    written.update(name, cast)
                writer.write_rows(name, start, cast)
            digests = stored.digests()
            _require_recorded(source, digests)
            if target != source_dtype:
                digests = written.digests()
            certificate = Certificate(
                "huggingface",
                source.shape,
                target,
                source_dtype,
                digests,
                dtypes=other_dtypes(dtypes, target),
            )
            writer.certify(certificate)
    return certificate


def verify(
    hf_dir: str | Path, megatron_dir: str | Path, *, progress: Progress = no_progress
) -> Mapping[str, tensor_store.TensorSpec]:
    """Prove that a converted folder converts back to ``hf_dir`` byte by byte, and that its certificate is right.

    Returns the tensors that were compared. A conversion with a cast is compared with the cast of the original. Raises
    MismatchError with the first tensor, file and offset that differs.
    """
    # Compare the files beside the weights with the certificate of ``hf_dir``. The certificate's hashes of tensors are
    # not needed: the loop below compares every tensor with the converted tensor.
    source_certificate(hf_dir)
    with (
        open_model(hf_dir) as (shape, original),
        TorchDistCheckpoint(megatron_dir, shape) as converted,
        TensorHashes() as hashes,
    ):
        for carried_name in carried_names(shape, original.specs):
            if carried_name not in converted.specs:
                raise MismatchError(f"{megatron_dir}: has no {carried_name}, which {hf_dir} has")
        for name, start, rows in blocks(converted, converted.specs, progress):
            original_rows = original.read_rows(name, start, len(rows)).to(rows.dtype)
            if not torch.equal(_as_integers(rows), _as_integers(original_rows)):
                raise MismatchError(_first_difference(converted, name, start, rows, original_rows))
            hashes.update(name, rows)
        _require_recorded(converted, hashes.digests())
        return converted.specs


def blocks(
    store: tensor_store.TensorStore, names: Iterable[str], progress: Progress
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield ``(name, first row, rows)`` of every tensor of ``names``, in order."""
    for name in names:
        for start, count in tensor_store.row_blocks(store.specs[name]):
            rows = store.read_rows(name, start, count)
            yield name, start, rows
            progress(rows.numel() * rows.dtype.itemsize)


def _dtypes(
    store: tensor_store.TensorStore, shape: ModelShape, dtype: str | None
) -> tuple[str, str]:
    """Return the stored type and the type of the result.

    If there are several stored types, their names are joined by ``+``. The callers allow this only with a ``dtype``, so
    the type of the result is always one type.
    """
    stored_dtype = "+".join(tensor_store.dtypes_of(store, shape))
    return stored_dtype, dtype or stored_dtype


def _target_dtypes(
    store: tensor_store.TensorStore, shape: ModelShape, dtype: str
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of the result. Carried tensors and the tensors of ``mapping.file_dtypes`` keep
    their stored dtype; all other tensors have ``dtype``."""
    dtypes = dict.fromkeys(hf_tensors(shape), TORCH_DTYPES[dtype])
    for name in (*file_dtypes(shape), *carried_names(shape, store.specs)):
        stored_dtype = store.specs[name].dtype
        if stored_dtype in TORCH_DTYPES.values():
            dtypes[name] = stored_dtype
        else:
            # The stored type is 8-bit. The store returns float32 for these weights, so cast them as all others.
            dtypes[name] = TORCH_DTYPES[dtype]
    return dtypes


def _finite_cast(
    rows: torch.Tensor, name: str, start: int, dtype: torch.dtype, folder: str | Path
) -> torch.Tensor:
    """Cast ``rows`` of the tensor ``name``, from row ``start`` on, to ``dtype``.

    Raises CheckpointError for NaN, and for values that ``dtype`` cannot represent.
    """
    tensor_store.require_finite(rows, name, start, str(folder))
    cast = rows.to(dtype)
    if cast.dtype != rows.dtype:
        tensor_store.require_finite(
            cast, name, start, f"{folder}, as {str(dtype).removeprefix('torch.')}"
        )
    return cast


def _require_recorded(source: TorchDistCheckpoint, digests: dict[str, str]) -> None:
    # A training run's checkpoint has a manifest instead of a certificate. The run checks the manifest when it resumes.
    if source.certificate is not None:
        for name, digest in digests.items():
            source.certificate.check_tensor(name, digest, source.folder)


def _first_difference(
    converted: TorchDistCheckpoint,
    name: str,
    start: int,
    rows: torch.Tensor,
    original_rows: torch.Tensor,
) -> str:
    differences = (_as_integers(rows) != _as_integers(original_rows)).nonzero()
    position = tuple(differences[0].tolist())
    index = [position[0] + start, *position[1:]]
    return (
        f"{name}{index}: {rows[position].item()!r} in {converted.locate(name, index)}, "
        f"{original_rows[position].item()!r} in the original ({len(differences)} elements of this block differ)"
    )


def _as_integers(rows: torch.Tensor) -> torch.Tensor:
    """View elements as integers, so that two elements are equal only if all their bytes are equal."""
    # As floats, a NaN would differ from itself, and -0 would equal 0.
    return rows.view({2: torch.int16, 4: torch.int32}[rows.dtype.itemsize])
