"""Checkpoints of a run: weights, optimizer, schedule, random generators and the loop's state.

Files of one checkpoint:

    manifest.json               written last: format, step, model, layout, optimizer settings, the
                                loop's state, and size and SHA-256 of every other file
    .metadata, common.pt, metadata.json, __<rank>_0.distcp
                                weights and optimizer in Megatron's distributed format
    rng_<rank>.json             the rank's random generators
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.nn import Parameter

from megatron_dppo.checkpoint_conversion.errors import CheckpointError
from megatron_dppo.model.layout import Layout
from megatron_dppo.system.files import write_synced
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    check_content,
    check_sizes,
    file_record,
    read_manifest,
)
from megatron_dppo.trainer.collective_actions import on_every_rank, on_rank_0
from megatron_dppo.trainer.collectives import agree, all_gather_json
from megatron_dppo.trainer.optimizer_state import (
    load_state,
    optimizer_steps,
    sharded_state,
    sharded_template,
)
from megatron_dppo.trainer.rng_state import restore_rng_state, rng_state
from megatron_dppo.trainer.sharded_files import ShardedSave, load_sharded

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)

MIB = 2**20
_SEED_STRIDE = 1_000_003
_SLACK_BYTES = MIB
"""Estimate for indices, generators and the manifest."""


class CheckpointStore:
    """Saves and loads the checkpoints of a run in ``directory``; keeps the ``keep`` last written.

    Every method is collective; a failure on one rank raises CheckpointError on all. ``fence`` is called
    before each change in the directory, collectively, and raises on all ranks what forbids it.
    """

    def __init__(
        self, directory: str | Path, keep: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        self._folders = CheckpointDirectory(directory, keep)
        self._fence = fence

    def survey(self) -> CheckpointSurvey:
        """What is there as global rank 0 sees it, the same on every rank."""
        return CheckpointSurvey.from_json(on_rank_0(lambda: self._folders.survey().to_json()))

    def set_aside(self, path: Path) -> None:
        """Give a damaged checkpoint a name under which nothing takes it for one, or deletes it."""
        on_rank_0(lambda: str(self._folders.set_aside(path)))

    def save(self, trainer: Trainer, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, publish it, then delete the older ones beyond ``keep``.

        A crash at any point leaves the older checkpoints unchanged and no folder that ``survey``
        would call complete.

        Args:
            trainer: whose weights, optimizer, schedule and generators are saved.
            step: number of the step.
            state: of the loop; plain JSON, the same on every rank.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: ``state`` differs between ranks.
            CheckpointError: a rank could not write.
            FencedError: another start of the run took over; no checkpoint was changed.
        """
        agree(state, "the run's state")
        self._fence()
        begun = on_rank_0(lambda: self._folders.begin(step).to_json())
        partial = StoredCheckpoint.from_json(begun)
        try:
            path = self._write(trainer, partial, state)
        except CheckpointError:
            if trainer.topology.rank == 0:
                self._folders.discard(partial)
            raise
        self._fence()
        on_rank_0(self._prune)
        return path

    def load(self, trainer: Trainer, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        """Load weights, optimizer, schedule, step count and generators into ``trainer``.

        The layout may differ from the saved one; then the generators are seeded from the run's seed
        and the step count.

        Returns:
            The loop's ``state`` as it was saved.

        Raises:
            DamagedCheckpointError: a file is damaged; nothing was loaded.
            CheckpointError: the model differs.
        """
        folder = checkpoint.path
        with _finding_damage():
            manifest = on_rank_0(lambda: _checked_manifest(folder))
        _check_model(trainer, manifest, folder)
        files = manifest["files"]
        own = sorted(files)[trainer.topology.rank :: trainer.topology.world_size]
        with _finding_damage():
            on_every_rank(lambda: check_content(folder, {name: files[name] for name in own}))

        parameters = _parameters(trainer)
        wanted = _model_state(trainer)
        wanted["optimizer"] = sharded_template(parameters, wanted)
        loaded = load_sharded(wanted, folder)
        for name, chunk in _named_chunks(trainer):
            chunk.load_state_dict(loaded[name], strict=trainer.adapted is None)
        load_state(trainer.optimizer, parameters, loaded["optimizer"], manifest["step_count"])
        trainer.step_count = manifest["step_count"]
        trainer.scheduler.num_steps = 0
        trainer.scheduler.step(increment=manifest["scheduler_steps"])
        _restore_generators(trainer, manifest, folder)
        return manifest["state"]

    def _write(self, trainer: Trainer, partial: StoredCheckpoint, state: dict[str, Any]) -> Path:
        rank, folder = trainer.topology.rank, partial.path
        on_every_rank(lambda: _check_step_count(trainer))
        tensors = _model_state(trainer)
        tensors["optimizer"] = sharded_state(trainer.optimizer, tensors)
        save = ShardedSave(tensors, trainer.topology.data_group)
        needed = sum(all_gather_json(save.own_bytes)) + _SLACK_BYTES
        free = on_rank_0(lambda: shutil.disk_usage(folder).free)

        def write_small_files() -> dict[str, Any]:
            write_synced(folder / _rng_file(rank), json.dumps(rng_state()))
            if rank == 0:
                save.write_headers(folder)
            return {path.name: file_record(path) for path in _files_of(folder, rank)}

        try:
            if free < needed:
                raise CheckpointError(os.strerror(errno.ENOSPC))
            save.write(folder)
            records = all_gather_json(on_every_rank(write_small_files))
            files = {name: record for part in records for name, record in part.items()}
            manifest = {**_facts(trainer), "state": state, "files": files}
            self._fence()
            return Path(on_rank_0(lambda: str(self._folders.publish(partial, manifest))))
        except CheckpointError as error:
            raise CheckpointError(
                f"can't save step {partial.step} in {self._folders.directory}: {error}; it needs "
                f"about {needed / MIB:.1f} MiB, {free / MIB:.1f} MiB were free; older checkpoints "
                "are as they were"
            ) from error

    def _prune(self) -> None:
        try:
            self._folders.prune()
        except OSError as error:
            log.warning("can't delete old checkpoints: %s", error)


@contextmanager
def _finding_damage() -> Iterator[None]:
    """Where it fails, the files are not those that were written."""
    try:
        yield
    except CheckpointError as error:
        raise DamagedCheckpointError(str(error)) from error


def _checked_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def _check_step_count(trainer: Trainer) -> None:
    counted = optimizer_steps(trainer.optimizer)
    if counted - {trainer.step_count}:
        raise ValueError(
            f"the optimizer counts {sorted(counted)} steps, the trainer {trainer.step_count}"
        )


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.json"


def _files_of(folder: Path, rank: int) -> list[Path]:
    """The files that ``rank`` has written."""
    tensors = sorted(folder.glob(f"__{rank}_*.distcp"))
    headers = [".metadata", "common.pt", "metadata.json"] if rank == 0 else []
    return [*tensors, folder / _rng_file(rank), *(folder / name for name in headers)]


def _named_chunks(trainer: Trainer) -> list[tuple[str, GPTModel]]:
    return [(f"model{i}", chunk) for i, chunk in enumerate(trainer.chunks)]


def _model_state(trainer: Trainer) -> dict[str, Any]:
    if trainer.adapted is not None:
        return trainer.adapted.sharded()
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {name: c.sharded_state_dict(metadata=metadata) for name, c in _named_chunks(trainer)}


def _parameters(trainer: Trainer) -> list[Parameter]:
    return [p for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad]


def _model_facts(trainer: Trainer) -> dict[str, Any]:
    """Properties of the model that a resumed run must not change."""
    shape = json.loads(json.dumps(asdict(trainer.shape)))
    adapters = {} if trainer.adapted is None else trainer.adapted.facts()
    return {**shape, "dtype": str(trainer.dtype).removeprefix("torch."), **adapters}


def _facts(trainer: Trainer) -> dict[str, Any]:
    return {
        "step_count": trainer.step_count,
        "scheduler_steps": trainer.scheduler.num_steps,
        "model": _model_facts(trainer),
        "layout": asdict(trainer.layout),
        "optimizer": trainer.config.optimizer.model_dump(),
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def _differences(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    names = sorted(saved.keys() | present.keys())
    return [
        f"{name} is {present.get(name)!r} here and {saved.get(name)!r} in the checkpoint"
        for name in names
        if saved.get(name) != present.get(name)
    ]


def _check_model(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for another model; log other optimizer settings, which are allowed."""
    if different := _differences(manifest["model"], _model_facts(trainer)):
        raise CheckpointError(f"{folder} holds another model: {'; '.join(different)}")
    changed = _differences(manifest["optimizer"], trainer.config.optimizer.model_dump())
    if changed and trainer.topology.rank == 0:
        log.warning("resuming with other optimizer settings: %s", "; ".join(changed))


def _restore_generators(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    saved = Layout(**manifest["layout"])
    if saved == trainer.layout:
        path = folder / _rng_file(trainer.topology.rank)
        restore_rng_state(on_every_rank(lambda: json.loads(path.read_text(encoding="utf-8"))))
        return
    seed = (trainer.config.run.seed + _SEED_STRIDE * trainer.step_count) % 2**31
    platform.seed_everything(seed)
    if trainer.topology.rank == 0:
        log.info(
            "%s was written under the layout %s, this run has %s: random generators start from "
            "seed %d",
            folder,
            saved.describe(),
            trainer.layout.describe(),
            seed,
        )
