"""Hugging Face weights into this rank's parameters, and the trained ones back, as a folder.

A file of an export is written by one rank, so that ranks on several hosts never write to the same. Its tensors
are gathered there; a thread writes them while the next ones are gathered. Last, a run's export of its policy: adapters
are merged into it, and written a second time by themselves, as PEFT's folder; transformers may check it.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_dppo.checkpoint_conversion import hf_folder, tensor_store, torch_dist
from megatron_dppo.checkpoint_conversion.certificate import Certificate
from megatron_dppo.checkpoint_conversion.gathering import gather
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.metrics.progress import progress
from megatron_dppo.metrics.records import EXPORT_FOLDER, remember_upload
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.gather_plan import (
    Bucket,
    ParameterKey,
    TensorSources,
    buckets_in_turn,
    elements_held,
    gather_plan,
)
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.shape import ModelShape
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
    chunks: list[GPTModel], shape: ModelShape, layout: Layout, rank: int, hf_dir: str | Path
) -> None:
    """Fill every parameter of this rank from ``hf_dir``, reading only the slices that it holds.

    Rows that pad the vocabulary become zero. Raises CheckpointError where a tensor of ``hf_dir`` is
    not of the name and shape that its config.json asks for, or holds NaN, ValueError where the model's parameters
    and the table disagree.
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
            # What no segment fills pads the vocabulary.
            parameter.zero_()
            for segment in entry.segments:
                part = reader.read(segment.hf_name, segment.dim, segment.hf_start, segment.length)
                tensor_store.require_finite(part, segment.hf_name, 0, str(hf_dir))
                segment.of_local(parameter).copy_(part)


def shared_digest(folder: str | Path, topology: Topology) -> str:
    """SHA-256 (hex) over all tensors of ``folder``, of which each rank reads its share. Collective."""
    digests = torch_dist.tensor_digests(folder, topology.rank, topology.world_size)
    return torch_dist.combined_digest(collectives.all_gather_json(digests))


BUCKET_BYTES = 256 * 2**20
"""Gathered at a time; a rank holds up to three: one that is gathered, one that waits, one that is written."""
# How many times longer a byte takes to the disk than between ranks. Assumption; it only spreads
# the files.
_WRITE_OVER_GATHER = 4

Files = Mapping[str, Mapping[str, tensor_store.TensorSpec]]


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
    """Write all weights into ``out_dir``. Collective.

    The folder appears whole or not at all, with a certificate. Names, index and bytes don't depend on the layout.

    Args:
        values: this rank's parameters by (chunk, name).
        rank: this process's global rank.
        model: its shape, its layout, and the dtype of the parameters.
        out_dir: the folder; it must not exist, or be empty.
        side_files_from: folder with config and tokenizer.
        max_shard_bytes: of a file.

    Raises CheckpointError on every rank where one can't write.
    """
    shape, layout, dtype = model
    specs = {name: tensor_store.TensorSpec(dims, dtype) for name, dims in hf_tensors(shape).items()}
    files = hf_folder.plan_files(specs, max_shard_bytes)
    plan, writer_of = export_plan(files, shape, layout, dtype.itemsize)
    try:
        with _staged(out_dir, rank, specs) as folder:
            share = {file: files[file] for file, writer in writer_of.items() if writer == rank}
            shares = collectives.all_gather_json(_write(folder, share, plan, rank, values))
            digests = {name: digest for part in shares for name, digest in part.items()}
            name = str(dtype).removeprefix("torch.")
            certificate = Certificate(
                "huggingface", shape, name, name, {n: digests[n] for n in specs}
            )
            collectives.on_rank_0(
                lambda: hf_folder.complete_folder(folder, files, side_files_from),
                error=CheckpointError,
            )
            collectives.on_rank_0(lambda: certificate.save(folder), error=CheckpointError)
    except CheckpointError as error:
        raise CheckpointError(
            f"the Hugging Face export was not written: {out_dir}: {error}"
        ) from error


def export_plan(
    files: Files, shape: ModelShape, layout: Layout, item_bytes: int
) -> tuple[list[Bucket], dict[str, int]]:
    """The buckets to gather, each on the rank that writes its tensors; the rank that writes each file.

    A file goes where it is written soonest: to a rank with little to write that holds much of it.
    """
    sources = {tensor.name: tensor for tensor in gather_plan(shape, layout)}
    load = [0] * layout.world_size
    writer_of: dict[str, int] = {}
    tensors: dict[int, list[TensorSources]] = {}
    for file, specs in files.items():
        held_bytes = [0] * layout.world_size
        for name in specs:
            for rank, elements in elements_held(sources[name]).items():
                held_bytes[rank] += elements * item_bytes
        size = sum(spec.bytes for spec in specs.values())
        cost = [load[r] + (size - held_bytes[r]) // _WRITE_OVER_GATHER for r in range(len(load))]
        writer = writer_of[file] = cost.index(min(cost))
        load[writer] += size
        tensors.setdefault(writer, []).extend(sources[name] for name in specs)
    return buckets_in_turn(tensors, BUCKET_BYTES, item_bytes), writer_of


@contextmanager
def _staged(
    out_dir: str | Path, rank: int, specs: Mapping[str, tensor_store.TensorSpec]
) -> Iterator[Path]:
    """The folder to fill, which rank 0 makes and publishes; collective at its begin and end."""
    staged = hf_folder.StagedFolder(out_dir, sum(spec.bytes for spec in specs.values()))
    with ExitStack() as stack:
        yield Path(
            collectives.on_rank_0(lambda: str(stack.enter_context(staged)), error=CheckpointError)
        )
        # Closing it publishes the folder.
        collectives.on_rank_0(stack.close, error=CheckpointError)


def _write(
    folder: Path,
    share: Files,
    plan: list[Bucket],
    rank: int,
    values: Mapping[ParameterKey, Tensor],
) -> dict[str, str]:
    """Gather all tensors and write this rank's ``share`` of the files; SHA-256 of their tensors. Collective."""
    with ExitStack() as stack:
        writer = collectives.on_every_rank(
            lambda: stack.enter_context(_FileWriter(folder, share)), error=CheckpointError
        )
        total, done = sum(bucket.elements for bucket in plan), 0
        with progress("export, millions of weights", total // 10**6) as bar:
            for bucket, gathered in zip(plan, gather(plan, rank, values), strict=True):
                writer.add(gathered.tensors)
                done += bucket.elements
                bar.update(completed=done // 10**6)
        collectives.on_every_rank(writer.finish, error=CheckpointError)
        return writer.digests


class _FileWriter:
    """Writes tensors to the files that they belong to, in a thread, one bucket behind. A context manager.

    After a failed write it takes tensors and drops them: the ranks must go through all buckets together.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder, self._files = folder, files
        self._stack = ExitStack()
        self._writer_of: dict[str, tensor_store.SafetensorsFileWriter] = {}
        # One waits beside the one that is written: the gathers must not run ahead of the disk.
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
        """Have whole tensors written, which must not change afterwards; waits while two buckets are on their way."""
        if tensors:
            self._buckets.put(tensors)

    def finish(self) -> None:
        """Wait for the disk. Raises what a write failed with."""
        self._end()
        if self._error is not None:
            raise self._error
        self._stack.close()
        for file in self._files:
            sync_to_disk(self._folder / file)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end()
        if kind is not None or self._error is not None:
            # Incomplete files must not open.
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
                # Raised by finish: the ranks must go through all buckets together.
                self._error = error


# --- a run's export, and its check: log-probabilities by transformers against the trainer's


def max_log_prob_difference(
    trainer: Trainer,
    folder: str | Path,
    trajectories: Sequence[Trajectory],
    temperature: float,
) -> float:
    """max |log pi_trainer - log pi_transformers| over the sampled tokens, nats. Collective.

    transformers loads ``folder`` on rank 0, in the exported dtype, on the CPU.

    Args:
        trainer: whose weights were exported.
        folder: the exported Hugging Face folder.
        trajectories: what to compare on.
        temperature: divides the logits on both sides.
    """
    light = [t.without(*t.columns) for t in trajectories]
    batches = trainer.packed(light)
    ours = trainer.log_probs(batches)[0].cpu()[batches[0].loss_mask]
    difference = None
    if trainer.topology.rank == 0:
        theirs = torch.cat(transformers_log_probs(folder, light, temperature))
        difference = (ours.double() - theirs.double()).abs().max().item()
    return broadcast_json(difference, src=0)


def transformers_log_probs(
    folder: str | Path, trajectories: Sequence[Trajectory], temperature: float
) -> list[torch.Tensor]:
    """log pi of each sampled token by transformers, nats: one fp32 tensor [N] for each trajectory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # As somebody else would load it: in the type that its config.json names.
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
        sampled = torch.from_numpy(np.flatnonzero(trajectory.loss_mask))
        with torch.no_grad():
            # The logits of a position are of the token after it.
            logits = model(ids[None]).logits[0, sampled - 1].float()
        log_probs = torch.log_softmax(logits / temperature, -1)
        answers.append(log_probs.gather(1, ids[sampled][:, None])[:, 0])
    return answers


ADAPTERS_FOLDER = "adapters"
SEQUENCES_TO_CHECK = 16
"""Number of examples that the check compares."""


Example = tuple[int, list[int], list[bool]]
"""Position in the batch, tokens and loss mask of a trajectory without branches, as plain values."""


def examples_of(trajectories: Mapping[int, Trajectory]) -> list[Example]:
    """The first trajectories of a batch that are on this rank; copies, of a batch that goes."""
    first = [
        (p, trajectories[p].branches[0]) for p in range(SEQUENCES_TO_CHECK) if p in trajectories
    ]
    return [(p, t.token_ids.tolist(), t.loss_mask.tolist()) for p, t in first]


def gathered_examples(examples: Sequence[Example]) -> list[Trajectory]:
    """Those of all ranks, in order, on every rank. Collective."""
    by_position = {p: t for share in all_gather_json(list(examples)) for p, *t in share}
    return [Trajectory(0, 0, *by_position[position]) for position in sorted(by_position)]


def export(
    directory: str,
    trainer: Trainer,
    examples: Sequence[Trajectory | Problem] | None,
) -> float | None:
    """Write ``<directory>/hf``, its adapters beside it, and check it on ``examples``. Collective.

    Args:
        directory: of the run.
        trainer: whose weights are exported.
        examples: sequences for the check, the first ``SEQUENCES_TO_CHECK`` are used; None: no check.

    Returns:
        Largest difference of a log-probability between trainer and export, nats; None without check.
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
    compared = [_compared(example) for example in examples[:SEQUENCES_TO_CHECK]]
    return max_log_prob_difference(trainer, folder, compared, trainer.config.temperature)


def upload_export(directory: str, repository: str, steps: int) -> None:
    """Send ``<directory>/hf``, of a run of ``steps`` steps, to huggingface.co. A failure is told with the command that
    repeats it, and not raised. Until one or the other the run is not finished."""
    folder = Path(directory) / EXPORT_FOLDER
    log.info("sending %s to %s", folder, repository)
    try:
        log.info("%s is sent: %s", folder, hf_folder.upload(folder, repository))
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


def _compared(example: Trajectory | Problem) -> Trajectory:
    """What the check compares on: a trajectory, or all of a problem's prompt but its first token."""
    if isinstance(example, Trajectory):
        return example
    return Trajectory.of_response(example.prompt_ids[:1], example.prompt_ids[1:])
