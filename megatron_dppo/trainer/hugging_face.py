"""Load Hugging Face weights into this rank's parameters, and export the trained weights as a Hugging Face folder.

Each file of an export is written by one rank, so that ranks on several hosts never write to the same file. That rank
gathers the file's tensors, and a thread writes them while the next ones are gathered.

``export`` writes the policy of a run: adapters are merged into the weights, and are also written alone, as a PEFT
folder. A check with transformers can follow, which compares its log-probabilities with the trainer's.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store, torch_dist, uploading
from megatron_dppo.checkpoint_conversion.certificate import Certificate, other_dtypes
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import EXPORT_FOLDER, remember_upload
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import family_of, no_tensor
from megatron_dppo.model.gather_plan import (
    Bucket,
    ParameterKey,
    TensorSources,
    buckets_in_turn,
    elements_held,
    gather_plan,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import carried_names, local_parameters, stepped
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import sync_to_disk
from megatron_dppo.trainer import collectives
from megatron_dppo.trainer.collectives import all_gather_json, barrier, broadcast_json
from megatron_dppo.trainer.model import named_parameters
from megatron_dppo.trainer.topology import Topology

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)


@torch.no_grad()
def load_hf(
    chunks: list[GPTModel],
    shape: ModelShape,
    layout: Layout,
    rank: int,
    hf_dir: str | Path,
) -> None:
    """Fill every parameter of this rank from ``hf_dir``, reading only the slices that the rank holds.

    Rows that pad the vocabulary become zero.

    Raises:
        CheckpointError: the name or shape of a tensor in ``hf_dir`` does not match its config.json, or a tensor is not
            finite.
        ValueError: the model's parameters differ from those of the conversion table.
    """
    parameters = named_parameters(chunks)
    table = {(p.chunk, p.name): p for p in local_parameters(shape, layout, rank)}
    if table.keys() != parameters.keys():
        raise ValueError(
            f"rank {rank}: the model and the conversion table name different parameters; only in "
            f"the model {sorted(parameters.keys() - table.keys())[:5]}, only in the table "
            f"{sorted(table.keys() - parameters.keys())[:5]}"
        )
    with torch_dist.open_checkpoint(hf_dir) as reader:
        reader.check(shape)
        for key, entry in table.items():
            parameter = parameters[key]
            if tuple(parameter.shape) != tuple(entry.shape):
                raise ValueError(
                    f"rank {rank}: {key} has shape {tuple(parameter.shape)} in the model, expected "
                    f"{tuple(entry.shape)}"
                )
            # Zero the parameter first: rows that no segment fills pad the vocabulary.
            parameter.zero_()
            for segment in entry.segments:
                span = segment.hf_end - segment.hf_start
                part = reader.read(segment.hf_name, segment.dim, segment.hf_start, span)
                part = stepped(part, segment.dim, 0, segment.length, segment.hf_step)
                tensor_store.require_finite(part, segment.hf_name, 0, str(hf_dir))
                segment.of_local(parameter).copy_(part)


def shared_digest(folder: str | Path, topology: Topology) -> str:
    """Return the SHA-256 (hex) over all tensors of ``folder``; each rank reads a share of them. Collective."""
    digests = torch_dist.tensor_digests(folder, topology.rank, topology.world_size)
    return torch_dist.combined_digest(collectives.all_gather_json(digests))


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
        side_files_from: folder from which configuration, tokenizer and carried tensors are copied.
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
    files: Files,
    shape: ModelShape,
    layout: Layout,
    item_bytes: int,
) -> tuple[list[Bucket], dict[str, int]]:
    """Plan the buckets, each gathered on the rank that writes its tensors, and the rank that writes each file.

    Each file is assigned to the rank that would finish it first: a rank with little to write yet, or one that holds a
    large part of the file.
    """
    sources = {tensor.name: tensor for tensor in gather_plan(shape, layout)}
    assigned_bytes = [0] * layout.world_size
    writer_of: dict[str, int] = {}
    tensors: dict[int, list[TensorSources]] = {}
    for file, specs in files.items():
        held_bytes = [0] * layout.world_size
        for name in specs:
            # No rank holds a carried tensor: the writer copies it from the folder that training started from.
            if name in sources:
                for rank, elements in elements_held(sources[name]).items():
                    held_bytes[rank] += elements * item_bytes
        size = sum(spec.bytes for spec in specs.values())
        # Costs count in bytes written. The cost of writing this file is the same on every rank, so leave it out.
        costs = []
        for rank in range(layout.world_size):
            gather_cost = (size - held_bytes[rank]) // _WRITE_OVER_GATHER
            costs.append(assigned_bytes[rank] + gather_cost)
        writer = costs.index(min(costs))
        writer_of[file] = writer
        assigned_bytes[writer] += size
        gathered_tensors = [sources[name] for name in specs if name in sources]
        tensors.setdefault(writer, []).extend(gathered_tensors)
    return buckets_in_turn(tensors, BUCKET_BYTES, item_bytes), writer_of


@contextmanager
def _staged(
    out_dir: str | Path,
    rank: int,
    specs: Mapping[str, tensor_store.TensorSpec],
) -> Iterator[Path]:
    """Provide a folder that rank 0 creates on entering the context and publishes on leaving it. Both are collective."""
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
    """A context manager that writes tensors to their files in a thread, while the caller gathers the next ones.

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
        """Queue whole tensors, which must not change afterwards; block while one bucket is written and one waits."""
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


def max_log_prob_difference(
    trainer: Trainer,
    folder: str | Path,
    trajectories: Sequence[Trajectory],
    temperature: float,
) -> float:
    """Compute max |log pi_trainer - log pi_transformers| over the sampled tokens, nats. Collective.

    Rank 0 loads ``folder`` with transformers, in the exported dtype, on the CPU.

    Args:
        trainer: the trainer whose weights were exported.
        folder: the exported Hugging Face folder.
        trajectories: the sequences to compare.
        temperature: divides the logits of both models.
    """
    # Drop all columns: recorded routing would send tokens to other experts than transformers does.
    sequences = [t.without(*t.columns) for t in trajectories]
    batches = trainer.packed(sequences)
    trainer_values = trainer.log_probs(batches)[0].cpu()[batches[0].loss_mask]
    difference = None
    if trainer.topology.rank == 0:
        transformers_values = torch.cat(transformers_log_probs(folder, sequences, temperature))
        difference = (trainer_values.double() - transformers_values.double()).abs().max().item()
    return broadcast_json(difference, src=0)


def transformers_log_probs(
    folder: str | Path,
    trajectories: Sequence[Trajectory],
    temperature: float,
) -> list[torch.Tensor]:
    """Compute log pi of each sampled token with transformers, nats: one fp32 tensor [N] for each trajectory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # Load the folder with the defaults, as its users do: in the dtype that its config.json names.
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    results = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        positions = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        with torch.no_grad():
            # The logits at a position predict the next token.
            logits = model(ids[None]).logits[0, positions - 1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        results.append(log_probs.gather(1, ids[positions][:, None])[:, 0])
    return results


ADAPTERS_FOLDER = "adapters"
SEQUENCES_TO_CHECK = 16
"""Number of sequences that the check compares."""


Example = tuple[int, list[int], list[bool]]
"""Position in the batch, tokens and loss mask of a trajectory's first branch, as plain values."""


def examples_of(trajectories: Mapping[int, Trajectory]) -> list[Example]:
    """Copy those of a batch's first ``SEQUENCES_TO_CHECK`` trajectories that are on this rank.

    The copies are used after the batch is freed.
    """
    examples = []
    for position in range(SEQUENCES_TO_CHECK):
        if position in trajectories:
            branch = trajectories[position].branches[0]
            examples.append((position, branch.token_ids.tolist(), branch.loss_mask.tolist()))
    return examples


def gathered_examples(examples: Sequence[Example]) -> list[Trajectory]:
    """Gather the examples of all ranks and return them on every rank, in the order of positions. Collective."""
    by_position: dict[int, list[Any]] = {}
    for share in all_gather_json(list(examples)):
        for position, *columns in share:
            by_position[position] = columns
    return [Trajectory(0, 0, *by_position[position]) for position in sorted(by_position)]


def export(
    directory: str,
    trainer: Trainer,
    examples: Sequence[Trajectory | Problem] | None,
) -> float | None:
    """Write ``<directory>/hf`` and the adapters next to it, then check the export on ``examples``. Collective.

    Args:
        directory: folder of the run.
        trainer: the trainer whose weights are exported.
        examples: sequences for the check, which uses the first ``SEQUENCES_TO_CHECK``; None: no check.

    Returns:
        Largest difference of a log-probability between trainer and export, nats; None without a check.
    """
    folder = Path(directory) / EXPORT_FOLDER
    _clear(folder, trainer)
    trainer.export_hf(folder)
    if trainer.adapted is not None and not trainer.config.lora.train_router:
        adapters = folder.with_name(ADAPTERS_FOLDER)
        _clear(adapters, trainer)
        trainer.adapted.export(adapters, trainer.config.model.hf_checkpoint)
    if examples is None:
        return None
    sequences = [_check_sequence(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, folder, sequences, trainer.config.temperature)


def upload_export(directory: str, repository: str, steps: int) -> None:
    """Upload ``<directory>/hf``, the export after ``steps`` steps, to huggingface.co.

    A failed upload is logged with the command that repeats it; the error is not raised. In both cases the upload is
    then recorded, so that the run counts as finished.
    """
    folder = Path(directory) / EXPORT_FOLDER
    log.info("sending %s to %s", folder, repository)
    try:
        log.info("%s is sent: %s", folder, uploading.upload(folder, repository))
    except CheckpointError as error:
        command = f"megatron-dppo convert upload --hf {folder} --repo {repository}"
        log.warning("%s; the run itself is finished. This repeats it: %s", error, command)
    remember_upload(directory, repository, steps)


def _clear(folder: Path, trainer: Trainer) -> None:
    """Remove the export of an earlier, shorter run; its weights are still in the checkpoints."""
    if trainer.topology.rank == 0 and folder.exists():
        shutil.rmtree(folder)
    # No rank continues before the folder is removed.
    barrier()


def _check_sequence(example: Trajectory | Problem) -> Trajectory:
    """Return the sequence to compare: the trajectory, or a problem's prompt with its first token as the prompt."""
    if isinstance(example, Trajectory):
        return example
    return Trajectory.of_response(example.prompt_ids[:1], example.prompt_ids[1:])
