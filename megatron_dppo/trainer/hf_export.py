"""Export the trained weights as a Hugging Face folder.

Each file of an export is written by one rank, so that ranks on several hosts never write to the same file. This rank
gathers the file's tensors. A thread of the rank writes gathered tensors while the rank gathers the next tensors.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store, torch_dist
from megatron_dppo.checkpoint_conversion.certificate import Certificate, other_dtypes
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of
from megatron_dppo.model.gather_plan import (
    Bucket,
    ParameterKey,
    TensorSources,
    buckets_in_turn,
    elements_held,
    gather_plan,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import carried_names
from megatron_dppo.model.rows import no_tensor
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import sync_to_disk
from megatron_dppo.trainer import collectives

BUCKET_BYTES = 256 * 2**20
"""Size of a bucket of tensors; a rank holds up to three: one is gathered, one waits and one is written."""
_WRITE_OVER_GATHER = 4
"""Time to write a byte to the disk, relative to the time to send it between ranks. The figure is an assumption; it only
affects which ranks write which files.
"""

Files = Mapping[str, Mapping[str, tensor_store.TensorSpec]]
"""The tensors of each file: file name -> tensor name -> spec."""


@torch.no_grad()
def export_hf(
    values: Mapping[ParameterKey, Tensor],
    rank: int,
    model: tuple[ModelShape, Layout, torch.dtype],
    out_dir: str | Path,
    *,
    side_files_from: str | Path,
    max_shard_bytes: int = hf_folder.DEFAULT_SHARD_BYTES,
) -> None:
    """Write all weights into ``out_dir``, with a certificate. Collective.

    The folder is published only when it is complete. File names, index and bytes do not depend on the layout.

    Args:
        values: this rank's parameters by (chunk, name).
        rank: this process's global rank.
        model: shape and layout of the model, and the dtype of the parameters.
        out_dir: the folder to write; it must not exist or must be empty.
        side_files_from: the folder that has the configuration, the tokenizer and the carried tensors; they are copied.
        max_shard_bytes: largest size of a file.

    Raises:
        CheckpointError: a rank could not write; raised on every rank.
    """
    shape, layout, dtype = model
    specs = hf_folder.trained_specs(shape, dtype) | _carried_specs(shape, side_files_from)
    files = hf_folder.plan_files(specs, max_shard_bytes)
    plan, writer_of = export_plan(files, shape, layout, dtype.itemsize)
    try:
        with _staged(out_dir, rank, specs) as folder:
            share = {file: files[file] for file, writer in writer_of.items() if writer == rank}
            digests_here = _write(folder, share, plan, rank, values, side_files_from)
            shares = collectives.all_gather_json(digests_here)
            failpoint("export/written")
            digests: dict[str, str] = {}
            for share_digests in shares:
                digests.update(share_digests)
            dtype_name = str(dtype).removeprefix("torch.")
            ordered_digests = {name: digests[name] for name in specs}
            certificate = Certificate(
                "huggingface",
                shape,
                dtype_name,
                dtype_name,
                ordered_digests,
                dtypes=other_dtypes({n: spec.dtype for n, spec in specs.items()}, dtype_name),
            )
            collectives.on_rank_0(
                lambda: hf_folder.complete_folder(folder, files, side_files_from),
                error=CheckpointError,
            )
            failpoint("export/certify")
            collectives.on_rank_0(lambda: certificate.save(folder), error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(
            f"the Hugging Face export was not written: {out_dir}: {error}"
        ) from error


def _carried_specs(shape: ModelShape, folder: str | Path) -> dict[str, tensor_store.TensorSpec]:
    """Return the tensors of ``folder`` that an export carries along."""
    if family_of(shape).carries is no_tensor:
        return {}
    with torch_dist.open_checkpoint(folder) as reader:
        return {name: reader.specs[name] for name in carried_names(shape, reader.specs)}


def export_plan(
    files: Files, shape: ModelShape, layout: Layout, item_bytes: int
) -> tuple[list[Bucket], dict[str, int]]:
    """Plan the buckets in which tensors are gathered, and choose the rank that writes each file.

    The rank that writes the tensors of a bucket gathers the bucket. Each file is assigned to the rank that would finish
    the file first: a rank with little to write yet, or a rank that holds a large part of the file.
    """
    sources = {tensor.name: tensor for tensor in gather_plan(shape, layout)}
    assigned_bytes = [0] * layout.world_size
    writer_of: dict[str, int] = {}
    tensors_by_writer: dict[int, list[TensorSources]] = {}
    for file, specs in files.items():
        held_bytes = [0] * layout.world_size
        for name in specs:
            # No rank holds a carried tensor: the writer copies it from the folder that training started from.
            if name in sources:
                for rank, elements in elements_held(sources[name]).items():
                    held_bytes[rank] += elements * item_bytes
        size = sum(spec.bytes for spec in specs.values())
        # A cost is a time, in units of the time that writing a byte takes. It leaves out the time to write this file,
        # which is the same on every rank.
        costs = []
        for rank in range(layout.world_size):
            gather_cost = (size - held_bytes[rank]) // _WRITE_OVER_GATHER
            costs.append(assigned_bytes[rank] + gather_cost)
        writer = costs.index(min(costs))
        writer_of[file] = writer
        assigned_bytes[writer] += size
        gathered_tensors = [sources[name] for name in specs if name in sources]
        tensors_by_writer.setdefault(writer, []).extend(gathered_tensors)
    return buckets_in_turn(tensors_by_writer, BUCKET_BYTES, item_bytes), writer_of


@contextmanager
def _staged(
    out_dir: str | Path, rank: int, specs: Mapping[str, tensor_store.TensorSpec]
) -> Iterator[Path]:
    """Provide a staged folder.

    Rank 0 creates the folder on entering the context, and publishes it on leaving the context. Entering and leaving are
    collective.
    """
    total_bytes = sum(spec.bytes for spec in specs.values())
    staged_folder = hf_folder.StagedFolder(out_dir, total_bytes)
    with ExitStack() as stack:

        def enter() -> str:
            return str(stack.enter_context(staged_folder))

        path = collectives.on_rank_0(enter, error=CheckpointError)
        yield Path(path)
        # Closing the stack publishes the folder.
        collectives.on_rank_0(stack.close, error=CheckpointError)


def _write(
    folder: Path,
    share: Files,
    plan: list[Bucket],
    rank: int,
    values: Mapping[ParameterKey, Tensor],
    carried_from: str | Path,
) -> dict[str, str]:
    """Gather all tensors and write this rank's ``share`` of the files. Collective.

    Args:
        folder: the staged folder.
        share: the files that this rank writes.
        plan: the buckets of all ranks, in the order of gathering.
        rank: this process's global rank.
        values: this rank's parameters by (chunk, name).
        carried_from: the folder that has the tensors of ``share`` that are not in ``plan``.

    Returns:
        SHA-256 (hex) of each tensor of ``share``, by name.
    """
    with ExitStack() as stack:
        open_files = partial(stack.enter_context, _FileWriter(folder, share))
        writer = collectives.on_every_rank(open_files, error=CheckpointError)
        total_elements = sum(bucket.elements for bucket in plan)
        written_elements = 0
        with progress("export, millions of weights", total_elements // 10**6) as bar:
            for bucket, gathered in zip(plan, gather(plan, rank, values), strict=True):
                writer.add(gathered.tensors)
                written_elements += bucket.elements
                bar.update(completed=written_elements // 10**6)
        planned_names = {tensor.name for bucket in plan for tensor in bucket.tensors}
        names_here = [name for specs in share.values() for name in specs]
        carried = [name for name in names_here if name not in planned_names]

        def copy_carried() -> None:
            if carried:
                with torch_dist.open_checkpoint(carried_from) as reader:
                    for name in carried:
                        writer.add([(name, reader.read(name))])

        collectives.on_every_rank(copy_carried, error=CheckpointError)
        collectives.on_every_rank(writer.finish, error=CheckpointError)
        return writer.digests


class _FileWriter:
    """A context manager that writes tensors to their files in a thread, while the caller gathers more tensors.

    After a failed write the thread discards further tensors, because all ranks must go through all buckets together;
    ``finish`` raises the error.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._stack = ExitStack()
        self._writer_of: dict[str, tensor_store.SafetensorsFileWriter] = {}
        # One bucket may wait while another is written: this bound keeps gathering from running ahead of the disk.
        self._buckets: queue.Queue[list[tuple[str, Tensor]] | None] = queue.Queue(1)
        self._error: BaseException | None = None
        self.digests: dict[str, str] = {}
        """SHA-256 of each tensor that was written."""
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)

    def __enter__(self) -> _FileWriter:
        with ExitStack() as stack:
            for file, specs in self._files.items():
                writer = stack.enter_context(
                    tensor_store.SafetensorsFileWriter(self._folder / file, specs)
                )
                self._writer_of.update(dict.fromkeys(specs, writer))
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def add(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Queue whole tensors; they must not change afterwards. Block while one bucket is written and another waits."""
        if tensors:
            self._buckets.put(tensors)

    def finish(self) -> None:
        """Wait until all tensors are on the disk; raise the error of a failed write."""
        self._end()
        if self._error is not None:
            raise self._error
        self._stack.close()
        for file in self._files:
            sync_to_disk(self._folder / file)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is not None or self._error is not None:
            # Close the files with an error, so that nothing can read them as complete.
            self._stack.__exit__(OSError, OSError(), None)

    def _end(self) -> None:
        if self._thread.is_alive():
            self._buckets.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (tensors := self._buckets.get()) is not None:
            try:
                if self._error is None:
                    for name, tensor in tensors:
                        rows = tensor.cpu().contiguous()
                        self._writer_of[name].write_rows(name, 0, rows)
                        self.digests[name] = hashlib.sha256(
                            tensor_store.byte_view(rows)
                        ).hexdigest()
            except BaseException as error:
                self._error = error
