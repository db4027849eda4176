"""Checkpoints of a run: weights, optimizer, schedule, random generators and the loop's state.

Files of one checkpoint:

    manifest.json               written last: format, step, model, layout, optimizer settings, the
                                loop's state, and size and SHA-256 of every other file
    .metadata, common.pt, metadata.json, __<rank>_0.distcp
                                weights and optimizer in Megatron's torch_dist format
    rng_<rank>.json             the rank's random generators

docs/checkpoints.md tells the whole.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed import ProcessGroup

from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks
from megatron_dppo.metrics import names
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointSurvey,
    DamagedCheckpointError,
    StoredCheckpoint,
    check_content,
    check_sizes,
    read_manifest,
)
from megatron_dppo.trainer.checkpoint_facts import (
    check_model,
    check_step_count,
    facts,
    restore_generators,
)
from megatron_dppo.trainer.checkpoint_task import (
    MIB,
    Fence,
    Place,
    RankPart,
    Saved,
    SaveTask,
    rng_file,
)
from megatron_dppo.trainer.collectives import (
    agree,
    all_gather_json,
    any_rank,
    on_every_rank,
    on_rank_0,
)
from megatron_dppo.trainer.held_blocks import HeldState, held_state, model_state, named_chunks
from megatron_dppo.trainer.host_copy import HostCopy
from megatron_dppo.trainer.optimizer_state import set_steps
from megatron_dppo.trainer.pending_save import PendingSave
from megatron_dppo.trainer.rng_state import rng_state
from megatron_dppo.trainer.topology import COLLECTIVE_TIMEOUT
from megatron_dppo.trainer.watchdog import BACKGROUND

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

log = logging.getLogger(__name__)

_SLACK_BYTES = MIB
"""Estimate for indices, generators and the manifest."""


def _unfenced(group: ProcessGroup | None) -> None:
    """No other start is expected."""


class CheckpointStore:
    """Saves and loads the checkpoints of a run in ``directory``; keeps the ``keep`` last written.

    Every method but ``figures`` and ``close`` is collective; a failure on one rank raises CheckpointError on all.

    Args:
        directory: the checkpoints' folder.
        keep: complete checkpoints that are kept.
        fence: called before each change in the directory; see ``checkpoint_task.Fence``.
        background: whether ``save`` returns when the state is copied to host memory; else when it is published.
        published: called with the step on global rank 0, in any thread, once a checkpoint has its name.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int,
        fence: Fence = _unfenced,
        *,
        background: bool = False,
        published: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._folders = CheckpointDirectory(directory, keep)
        self._fence = fence
        self._background = background
        self._published = published
        self._group = dist.new_group(
            backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc=BACKGROUND
        )
        self._copy = HostCopy()
        self._pending: PendingSave | None = None
        self._saved: list[Saved] = []

    def survey(self) -> CheckpointSurvey:
        """What is there as global rank 0 sees it, the same on every rank."""
        return CheckpointSurvey.from_json(
            on_rank_0(lambda: self._folders.survey().to_json(), error=CheckpointError)
        )

    def set_aside(self, path: Path) -> None:
        """Give a damaged checkpoint a name under which nothing takes it for one, or deletes it."""
        on_rank_0(lambda: str(self._folders.set_aside(path)), error=CheckpointError)

    def save(self, trainer: Trainer, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, publish it, then delete the older ones beyond ``keep``; first wait for the last save.

        In the background, what is written is the trainer's state at this call. A crash at any point leaves the older
        checkpoints unchanged and no folder that ``survey`` would call complete.

        Args:
            trainer: whose weights, optimizer, schedule and generators are saved.
            step: number of the step.
            state: of the loop; plain JSON, the same on every rank.

        Raises:
            ValueError: ``state`` differs between ranks.
            CheckpointError: a rank could not write this one, or the one before it.
            FencedError: another start of the run took over; no checkpoint was changed.
        """
        self.finish()
        agree(state, "the run's state")
        on_every_rank(lambda: check_step_count(trainer), error=CheckpointError)
        self._fence(None)
        begun = on_rank_0(lambda: self._folders.begin(step).to_json(), error=CheckpointError)
        partial = StoredCheckpoint.from_json(begun)
        held = held_state(_model_state(trainer), trainer.optimizer)
        own = sum(one.block.bytes for one in held.own)
        place = Place(
            self._folders,
            partial,
            needed=sum(all_gather_json(own)) + _SLACK_BYTES,
            free=on_rank_0(lambda: shutil.disk_usage(partial.path).free, error=CheckpointError),
        )
        self._pending = PendingSave(
            SaveTask(
                place,
                self._part(held, copied=self._background and place.free >= place.needed),
                {**facts(trainer), "state": state},
                self._group,
                self._fence,
                self._published,
            )
        )
        if not self._background:
            self.finish()

    def poll(self) -> None:
        """Raise what the save in the background failed with, on any rank; let go of it once it is published.

        Raises CheckpointError or FencedError, as ``save``.
        """
        if (pending := self._pending) is None:
            return
        reports = all_gather_json(pending.report())
        self._pending = None
        saved = pending.settle(reports)
        if saved is None:
            self._pending = pending
            return
        self._saved.append(saved)
        if dist.get_rank() == 0:
            log.info(
                "checkpoint of step %d: %.1f MiB written in %.1f s",
                saved.step,
                saved.bytes / MIB,
                saved.seconds,
            )

    def finish(self) -> None:
        """Wait until the last save is published. Raises as ``poll``."""
        if self._pending is not None:
            self._pending.wait()
            self.poll()

    def figures(self) -> dict[str, float]:
        """Metrics of what was published since the last call. Not collective."""
        saved, self._saved = self._saved, []
        if not saved:
            return {}
        return {
            names.CHECKPOINT_BYTES: sum(one.bytes for one in saved),
            names.CHECKPOINT_WRITTEN: sum(one.seconds for one in saved),
        }

    def close(self) -> None:
        """Let a save that is being written end, also where the run failed. Not collective."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def load(self, trainer: Trainer, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        """Load weights, optimizer, schedule, step count and generators into ``trainer``.

        The layout may differ from the saved one; then the generators are seeded from the run's seed
        and the step count. Each rank reads what it holds. Load only trusted checkpoints.

        Returns:
            The loop's ``state`` as it was saved.

        Raises:
            DamagedCheckpointError: a file is damaged; nothing was loaded.
            CheckpointError: the model differs.
        """
        folder = checkpoint.path
        with _finding_damage():
            manifest = on_rank_0(lambda: _checked_manifest(folder), error=CheckpointError)
        check_model(trainer, manifest, folder)
        files = manifest["files"]
        own = sorted(files)[trainer.topology.rank :: trainer.topology.world_size]
        with _finding_damage():
            on_every_rank(
                lambda: check_content(folder, {name: files[name] for name in own}),
                error=CheckpointError,
            )

        model = _model_state(trainer)
        held = held_state(model, trainer.optimizer)
        on_every_rank(lambda: _fill(held, folder), error=CheckpointError)
        _load_objects(trainer, model, folder)
        set_steps(trainer.optimizer, manifest["step_count"])
        trainer.step_count = manifest["step_count"]
        trainer.scheduler.num_steps = 0
        trainer.scheduler.step(increment=manifest["scheduler_steps"])
        path = folder / rng_file(trainer.topology.rank)
        restore_generators(
            trainer,
            manifest,
            folder,
            lambda: on_every_rank(
                lambda: json.loads(path.read_text(encoding="utf-8")), error=CheckpointError
            ),
        )
        return manifest["state"]

    def _part(self, held: HeldState, *, copied: bool) -> RankPart:
        blocks = [(one.block, one.values) for one in held.own]
        return RankPart(
            blocks=self._copy.take(blocks) if copied else blocks,
            objects=held.objects,
            generators=json.dumps(rng_state()),
        )


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


def _fill(held: HeldState, folder: Path) -> None:
    with StoredBlocks(folder) as stored:
        for one in held.blocks:
            stored.fill(one.block, one.values)


def _load_objects(trainer: Trainer, model: dict[str, Any], folder: Path) -> None:
    """Load the modules' extra states, which Transformer Engine has; Megatron's loader knows their form."""
    objects = {
        name: {key: value for key, value in chunk.items() if isinstance(value, ShardedObject)}
        for name, chunk in model.items()
    }
    if any_rank(any(objects.values())):
        loaded = dist_checkpointing.load(objects, str(folder))
        for name, chunk in named_chunks(trainer.chunks):
            chunk.load_state_dict(loaded[name], strict=False)


def _model_state(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds of the model: all of it, or the adapters of a frozen one."""
    if trainer.adapted is not None:
        return trainer.adapted.sharded()
    return model_state(trainer.chunks)
