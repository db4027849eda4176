"""Checkpoints of a run: weights, optimizer, schedule, random generators and the loop's state.

Files of one checkpoint:

    manifest.json               written last: format, step, model, layout, optimizer settings, the
                                loop's state, and size and SHA-256 of every other file
    .metadata, common.pt, metadata.json, __<rank>_0.distcp
                                weights and optimizer in Megatron's torch_dist format
    rng_<rank>.json             the rank's random generators

docs/checkpoints.md describes the format and the order of writing.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import random as megatron_random
from pydantic import TypeAdapter

from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks, TensorBlock
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer import collectives, platform
from megatron_dppo.trainer.checkpoint import saving
from megatron_dppo.trainer.checkpoint.directory import (
    CheckpointDirectory,
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    check_content,
    check_sizes,
    read_manifest,
)
from megatron_dppo.trainer.checkpoint.state import (
    STATE_PREFIX,
    RankState,
    model_state,
    named_chunks,
    optimizer_steps,
    rank_state,
    set_steps,
    synchronize_masters,
)
from megatron_dppo.trainer.topology import COLLECTIVE_TIMEOUT
from megatron_dppo.trainer.watchdog import BACKGROUND

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer


log = logging.getLogger(__name__)

# Estimated size of the index files, the generators' states and the manifest.
_SLACK_BYTES = saving.MIB
_SEED_STRIDE = 1_000_003
"""Distance between the seeds of consecutive step counts: large, so that runs with close ``run.seed`` share no seed."""
_SURVEY = TypeAdapter(CheckpointSurvey)
_STORED = TypeAdapter(StoredCheckpoint)


class CheckpointStore:
    """Saves and loads the checkpoints of a run in ``directory``; keeps only the ``keep`` checkpoints written last.

    Every method except ``figures`` and ``close`` is collective; a failure on one rank raises CheckpointError on all.

    Args:
        directory: folder of all checkpoints of the run.
        keep: number of complete checkpoints to keep.
        fence: called before folders are created, published, renamed or deleted; see ``saving.Fence``.
        background: True: ``save`` returns once the state is copied to host memory; False: once it is published.
        published: called on global rank 0 with the step once a checkpoint has its final name, from any thread.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int,
        fence: saving.Fence = lambda group: None,
        *,
        background: bool = False,
        published: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folders = CheckpointDirectory(directory, keep)
        self._fence = fence
        self._background = background
        self._published = published
        # The writing thread needs a separate group: its collectives must not mix with the collectives of training.
        self._group = dist.new_group(
            backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc=BACKGROUND
        )
        self._copy = saving.HostCopy()
        self._thread = saving.SaveThread()
        self._pending: saving.PendingSave | None = None
        self._saved: list[saving.Saved] = []

    @property
    def directory(self) -> Path:
        """The folder of all checkpoints of the run."""
        return self._folders.directory

    def survey(self) -> CheckpointSurvey:
        """Survey the directory on global rank 0 and return the survey on every rank."""
        survey_json = collectives.on_rank_0(self._survey, error=CheckpointError)
        return _SURVEY.validate_python(survey_json)

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint, so that nothing loads or deletes it. Raises FencedError."""
        self._fence(None)
        collectives.on_rank_0(partial(self._set_aside, path), error=CheckpointError)

    def _survey(self) -> dict[str, Any]:
        return _SURVEY.dump_python(self._folders.survey(), mode="json")

    def _set_aside(self, path: Path) -> str:
        return str(self._folders.set_aside(path))

    def _begin(self, step: int) -> dict[str, Any]:
        return _STORED.dump_python(self._folders.begin(step), mode="json")

    def save(
        self, trainer: Trainer, step: int, state: dict[str, Any], *, suspect: bool = False
    ) -> None:
        """Wait for the previous save, write and publish a checkpoint, then delete the oldest, so that ``keep`` remain.

        A background save writes the trainer's state at the time of this call. A crash at any point leaves the older
        checkpoints unchanged, and leaves no incomplete folder that ``survey`` would list as complete.

        Args:
            trainer: the trainer whose weights, optimizer, schedule and generators are saved.
            step: number of the step.
            state: state of the loop; plain JSON, the same on every rank.
            suspect: keep the checkpoint for the doctor, under a name that no start loads. Such a save deletes only
                older suspect checkpoints.

        Raises:
            ValueError: ``state`` differs between ranks.
            ParkedError: the trainer is parked.
            CheckpointError: a rank could not write this checkpoint or the previous one.
            FencedError: another start of the run took over; no checkpoint was changed.
        """
        trainer.check_resident("save a checkpoint")
        self.finish()
        collectives.agree(state, "the run's state")
        collectives.on_every_rank(partial(check_step_count, trainer), error=CheckpointError)
        self._fence(None)
        stored_json = collectives.on_rank_0(partial(self._begin, step), error=CheckpointError)
        stored = _STORED.validate_python(stored_json)
        state_of_rank = rank_state(_model_state(trainer), trainer.optimizer)
        share_bytes = sum(block.bytes for block, _ in state_of_rank.share)
        needed_bytes = sum(collectives.all_gather_json(share_bytes)) + _SLACK_BYTES
        # Rank 0 measures the free space for all ranks, so that all of them agree on whether to make a host copy.
        free_bytes = collectives.on_rank_0(partial(_free_bytes, stored.path), error=CheckpointError)
        target = saving.SaveTarget(self._folders, stored, needed_bytes, free_bytes)
        # A save without enough disk space fails before it reads the blocks, so it needs no copy.
        needs_copy = self._background and target.free >= target.needed
        task = saving.SaveTask(
            target,
            self._part(state_of_rank, copied=needs_copy),
            {**facts(trainer), "state": state},
            self._group,
            self._fence,
            self._published,
            suspect,
        )
        self._pending = saving.PendingSave(task, self._thread)
        if not self._background:
            self.finish()

    def poll(self) -> None:
        """Check the background save: forget it once it is published, and raise its error if it failed on any rank.

        Raises:
            CheckpointError, FencedError: as ``save``.
        """
        pending = self._pending
        if pending is None:
            return
        reports = collectives.all_gather_json(pending.report())
        # Forget the save before ``outcome``, because ``outcome`` raises an error if the save has failed.
        self._pending = None
        saved = pending.outcome(reports)
        if saved is None:
            self._pending = pending
            return
        self._saved.append(saved)
        if dist.get_rank() == 0:
            log.info(
                "checkpoint of step %d: %.1f MiB written in %.1f s",
                saved.step,
                saved.bytes / saving.MIB,
                saved.seconds,
            )

    def finish(self) -> None:
        """Wait until the last save is published; raise the errors that ``poll`` raises."""
        if self._pending is not None:
            # If another rank's save fails outside of a collective, the save of this rank may wait forever in its next
            # collective. So every rank reads the reports of all ranks again and again, instead of only waiting for its
            # own save.
            self._pending.wait(self._has_ended)

    def _has_ended(self) -> bool:
        """Return whether no save is pending after ``poll``. Collective."""
        self.poll()
        return self._pending is None

    def figures(self) -> dict[str, float]:
        """Return metrics of the checkpoints that were published since the last call. Not collective."""
        checkpoints = self._saved
        self._saved = []
        if not checkpoints:
            return {}
        return {
            metric_names.CHECKPOINT_BYTES: sum(saved.bytes for saved in checkpoints),
            metric_names.CHECKPOINT_WRITTEN: sum(saved.seconds for saved in checkpoints),
        }

    def close(self) -> None:
        """Wait for an unfinished save to end, also after the run has failed. Not collective."""
        if self._pending is not None:
            self._pending.wait_and_log_error()
            self._pending = None
        self._thread.close()

    def load(self, trainer: Trainer, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        """Load weights, optimizer, schedule, step count and generators into ``trainer``.

        The layout may differ from the saved one; then the generators are seeded from the run's seed
        and the step count. Each rank reads only its own blocks. Load only trusted checkpoints.

        Returns:
            The loop's ``state`` as it was saved.

        Raises:
            DamagedCheckpointError: a file is damaged; nothing was loaded.
            CheckpointError: the checkpoint has another model or reference policy, or cannot be read.
        """
        trainer.check_resident("load a checkpoint")
        folder = checkpoint.path
        manifest = collectives.on_rank_0(
            partial(_checked_manifest, folder), error=DamagedCheckpointError
        )
        check_model(trainer, manifest, folder)
        files = manifest["files"]
        # Each rank hashes a share of the files.
        own_names = sorted(files)[trainer.topology.rank :: trainer.topology.world_size]
        own_files = {name: files[name] for name in own_names}
        collectives.on_every_rank(
            partial(check_content, folder, own_files), error=DamagedCheckpointError
        )
        model = _model_state(trainer)
        state = rank_state(model, trainer.optimizer)
        collectives.on_every_rank(partial(_fill, state, folder), error=CheckpointError)
        _load_objects(trainer, model, folder)
        synchronize_masters(trainer.optimizer)
        set_steps(trainer.optimizer, manifest["step_count"])
        trainer.step_count = manifest["step_count"]
        trainer.scheduler.num_steps = 0
        trainer.scheduler.step(increment=manifest["scheduler_steps"])
        _restore_generators(trainer, manifest, folder)
        return manifest["state"]

    def _part(self, state: RankState, *, copied: bool) -> saving.RankPart:
        return saving.RankPart(
            blocks=self._copy.take(state.share) if copied else state.share,
            objects=state.objects,
            generators=json.dumps(rng_state()),
        )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _checked_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest and compare the sizes of the files with it."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def _fill(state: RankState, folder: Path) -> None:
    """Read all blocks of this rank from ``folder`` into the trainer's tensors."""
    with StoredBlocks(folder) as stored:
        for block, values in state.blocks:
            _fill_block(stored, block, values)


def _fill_block(stored: StoredBlocks, block: TensorBlock, values: torch.Tensor) -> None:
    """Read ``block`` into ``values``. Moments that are stored in another type are converted."""
    tensor = stored.tensors.get(block.key)
    has_other_type = tensor is not None and tensor.dtype != block.dtype
    if not (has_other_type and block.key.startswith(STATE_PREFIX)):
        stored.fill(block, values)
        return
    assert tensor is not None
    read_values = torch.empty(block.box.sizes, dtype=tensor.dtype)
    stored.fill(replace(block, dtype=tensor.dtype), read_values)
    values.copy_(read_values)


def _load_objects(trainer: Trainer, model: dict[str, Any], folder: Path) -> None:
    """Load the extra states of Transformer Engine's modules with Megatron's loader, which can decode these states."""
    objects: dict[str, dict[str, ShardedObject]] = {}
    for name, chunk_state in model.items():
        objects[name] = {k: v for k, v in chunk_state.items() if isinstance(v, ShardedObject)}
    if collectives.any_rank(any(objects.values())):
        loaded = dist_checkpointing.load(objects, str(folder))
        for name, chunk in named_chunks(trainer.chunks):
            chunk.load_state_dict(loaded[name], strict=False)


def _model_state(trainer: Trainer) -> dict[str, Any]:
    """Return the sharded state of the model that a checkpoint holds: all weights, or only the adapters with LoRA."""
    if trainer.adapted is not None:
        return trainer.adapted.sharded()
    return model_state(trainer.chunks)


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and the device's generators, and of Megatron's streams."""
    format_number, numbers, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    twister_state = numpy_state["state"]
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [format_number, list(numbers), gauss],
        "numpy": {**numpy_state, "state": {**twister_state, "key": twister_state["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "device": _text(megatron_random._get_cuda_rng_state()),
        "streams": {name: _text(state) for name, state in streams.items()},
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Set every generator to ``state`` of :func:`rng_state`; each continues bit for bit."""
    format_number, numbers, gauss = state["python"]
    random.setstate((format_number, tuple(numbers), gauss))
    numpy_state = state["numpy"]
    twister_state = numpy_state["state"]
    key = np.array(twister_state["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**twister_state, "key": key}})
    # Without CUDA, both calls set torch's CPU generator. The second call then decides its state.
    megatron_random._set_cuda_rng_state(_tensor(state["device"]))
    torch.set_rng_state(_tensor(state["torch"]))
    streams = {name: _tensor(text) for name, text in state["streams"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)


def _text(state: torch.Tensor) -> str:
    """Encode the bytes of a generator's state as hexadecimal text."""
    return state.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    """Decode the state that :func:`_text` encoded."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()


def facts(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's entries of a manifest: counts, model, layout and settings."""
    return {
        "step_count": trainer.step_count,
        "scheduler_steps": trainer.scheduler.num_steps,
        "model": _model_facts(trainer),
        "reference_sha256": trainer.reference_sha256,
        "layout": asdict(trainer.layout),
        "optimizer": trainer.config.optimizer.model_dump(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def check_step_count(trainer: Trainer) -> None:
    """Raise CheckpointError unless optimizer and trainer count the same steps."""
    step_counts = optimizer_steps(trainer.optimizer)
    if step_counts - {trainer.step_count}:
        raise CheckpointError(
            f"the optimizer counts {sorted(step_counts)} steps, the trainer {trainer.step_count}"
        )


def check_model(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if the model or the reference policy differs; log optimizer settings that differ."""
    # The manifest of an older version lacks newer fields of ModelShape. That version could only train models with the
    # default values of these fields.
    saved_model = _default_facts() | manifest["model"]
    model_differences = _differences(saved_model, _model_facts(trainer))
    if model_differences:
        raise CheckpointError(f"{folder} holds another model: {'; '.join(model_differences)}")
    if "reference_sha256" not in manifest:
        raise CheckpointError(
            f"{folder}: manifest.json has no reference_sha256, expected that of the reference policy or null; a "
            "version before the first release wrote it"
        )
    saved_hash = manifest["reference_sha256"]
    current_hash = trainer.reference_sha256
    # If only one side has a hash, the configurations differ, and RunState.check_identity reports the difference.
    if saved_hash is not None and current_hash is not None and saved_hash != current_hash:
        raise CheckpointError(
            f"{folder} was trained with another reference policy: the SHA-256 of what the run started from "
            f"(model.hf_checkpoint, lora.start_from) is {current_hash} here and {saved_hash} in the checkpoint"
        )
    setting_changes = _differences(manifest["optimizer"], trainer.config.optimizer.model_dump())
    if setting_changes and trainer.topology.rank == 0:
        log.warning("resuming with other optimizer settings: %s", "; ".join(setting_changes))


def _restore_generators(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Set this rank's random generators to the saved state. Collective.

    If the layout differs from the saved one, seed the generators from the run's seed and the step count.
    """
    saved_layout = Layout(**manifest["layout"])
    topology = trainer.topology
    if saved_layout == trainer.layout:
        path = folder / saving.rng_file(topology.rank)
        state = collectives.on_every_rank(partial(_read_json, path), error=CheckpointError)
        restore_rng_state(state)
        return
    seed = (trainer.config.run.seed + _SEED_STRIDE * trainer.step_count) % 2**31
    platform.seed_everything(seed)
    if topology.rank == 0:
        log.info(
            "%s was written under the layout %s, this run has %s: random generators start from seed %d",
            folder,
            saved_layout.describe(),
            trainer.layout.describe(),
            seed,
        )


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _default_facts() -> dict[str, Any]:
    """Return the default values of ModelShape's fields, by name, in the form that a manifest has."""
    defaults: dict[str, Any] = {}
    for field in fields(ModelShape):
        value = field.default
        if value is MISSING:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        defaults[field.name] = json.loads(json.dumps(value))
    return defaults


def _model_facts(trainer: Trainer) -> dict[str, Any]:
    """Return the properties of the model that a resumed run must not change."""
    shape = json.loads(json.dumps(asdict(trainer.shape)))
    adapters = {}
    if trainer.adapted is not None:
        adapters = trainer.adapted.facts()
    return {**shape, "dtype": str(trainer.dtype).removeprefix("torch."), **adapters}


def _differences(saved_settings: dict[str, Any], present_settings: dict[str, Any]) -> list[str]:
    """Describe each key whose value differs between the checkpoint's settings and this run's settings."""
    differences = []
    for name in sorted(saved_settings.keys() | present_settings.keys()):
        saved_value = saved_settings.get(name)
        value = present_settings.get(name)
        if value != saved_value:
            differences.append(f"{name} is {value!r} here and {saved_value!r} in the checkpoint")
    return differences
