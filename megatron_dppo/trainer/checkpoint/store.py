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
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
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

from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks
from megatron_dppo.metrics import table as names
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.layout import Layout
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
    RankState,
    model_state,
    named_chunks,
    optimizer_steps,
    rank_state,
    set_steps,
)
from megatron_dppo.trainer.topology import COLLECTIVE_TIMEOUT
from megatron_dppo.trainer.watchdog import BACKGROUND

if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer


log = logging.getLogger(__name__)

# Estimate for indices, generators and the manifest.
_SLACK_BYTES = saving.MIB
_SEED_STRIDE = 1_000_003
_SURVEY = TypeAdapter(CheckpointSurvey)
_STORED = TypeAdapter(StoredCheckpoint)


class CheckpointStore:
    """Saves and loads the checkpoints of a run in ``directory``; keeps the ``keep`` last written.

    Every method but ``figures`` and ``close`` is collective; a failure on one rank raises CheckpointError on all.

    Args:
        directory: the checkpoints' folder.
        keep: complete checkpoints that are kept.
        fence: called before each change in the directory; see ``saving.Fence``.
        background: whether ``save`` returns when the state is copied to host memory; else when it is published.
        published: called with the step on global rank 0, in any thread, once a checkpoint has its name.
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
        # Of its own: the writing thread's collectives must not meet the training's in one group.
        self._group = dist.new_group(
            backend="gloo", timeout=COLLECTIVE_TIMEOUT, group_desc=BACKGROUND
        )
        self._copy = saving.HostCopy()
        self._pending: saving.PendingSave | None = None
        self._saved: list[saving.Saved] = []

    @property
    def directory(self) -> Path:
        """The checkpoints' folder."""
        return self._folders.directory

    def survey(self) -> CheckpointSurvey:
        """What is there as global rank 0 sees it, the same on every rank."""
        survey = collectives.on_rank_0(
            lambda: _SURVEY.dump_python(self._folders.survey(), mode="json"), error=CheckpointError
        )
        return _SURVEY.validate_python(survey)

    def set_aside(self, path: Path) -> None:
        """Give a damaged checkpoint a name under which nothing takes it for one, or deletes it."""
        collectives.on_rank_0(lambda: str(self._folders.set_aside(path)), error=CheckpointError)

    def save(
        self, trainer: Trainer, step: int, state: dict[str, Any], *, suspect: bool = False
    ) -> None:
        """Write a checkpoint, publish it, then delete the older ones beyond ``keep``; first wait for the last save.

        In the background, what is written is the trainer's state at this call. A crash at any point leaves the older
        checkpoints unchanged and no folder that ``survey`` would call complete.

        Args:
            trainer: whose weights, optimizer, schedule and generators are saved.
            step: number of the step.
            state: of the loop; plain JSON, the same on every rank.
            suspect: keep it for the doctor, under a name that no start loads; no older checkpoint is deleted for it.

        Raises:
            ValueError: ``state`` differs between ranks.
            ParkedError: the trainer is parked.
            CheckpointError: a rank could not write this one, or the one before it.
            FencedError: another start of the run took over; no checkpoint was changed.
        """
        trainer.check_resident("save a checkpoint")
        self.finish()
        collectives.agree(state, "the run's state")
        collectives.on_every_rank(lambda: check_step_count(trainer), error=CheckpointError)
        self._fence(None)
        begun = collectives.on_rank_0(
            lambda: _STORED.dump_python(self._folders.begin(step), mode="json"),
            error=CheckpointError,
        )
        partial = _STORED.validate_python(begun)
        state_of_rank = rank_state(_model_state(trainer), trainer.optimizer)
        share_bytes = sum(block.bytes for block, _ in state_of_rank.share)
        target = saving.SaveTarget(
            self._folders,
            partial,
            needed=sum(collectives.all_gather_json(share_bytes)) + _SLACK_BYTES,
            # Asked once for all: with less room than it needs, all ranks together write without a copy.
            free=collectives.on_rank_0(
                lambda: shutil.disk_usage(partial.path).free, error=CheckpointError
            ),
        )
        self._pending = saving.PendingSave(
            saving.SaveTask(
                target,
                self._part(state_of_rank, copied=self._background and target.free >= target.needed),
                {**facts(trainer), "state": state},
                self._group,
                self._fence,
                self._published,
                suspect,
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
        reports = collectives.all_gather_json(pending.report())
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
                saved.bytes / saving.MIB,
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
        trainer.check_resident("load a checkpoint")
        folder = checkpoint.path
        manifest = collectives.on_rank_0(
            lambda: _checked_manifest(folder), error=DamagedCheckpointError
        )
        check_model(trainer, manifest, folder)
        files = manifest["files"]
        share = sorted(files)[trainer.topology.rank :: trainer.topology.world_size]
        collectives.on_every_rank(
            lambda: check_content(folder, {name: files[name] for name in share}),
            error=DamagedCheckpointError,
        )

        model = _model_state(trainer)
        state = rank_state(model, trainer.optimizer)
        collectives.on_every_rank(lambda: _fill(state, folder), error=CheckpointError)
        _load_objects(trainer, model, folder)
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


def _checked_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    return manifest


def _fill(state: RankState, folder: Path) -> None:
    with StoredBlocks(folder) as stored:
        for block, values in state.blocks:
            stored.fill(block, values)


def _load_objects(trainer: Trainer, model: dict[str, Any], folder: Path) -> None:
    """Load the modules' extra states, which Transformer Engine has; Megatron's loader knows their form."""
    objects = {
        name: {key: value for key, value in chunk.items() if isinstance(value, ShardedObject)}
        for name, chunk in model.items()
    }
    if collectives.any_rank(any(objects.values())):
        loaded = dist_checkpointing.load(objects, str(folder))
        for name, chunk in named_chunks(trainer.chunks):
            chunk.load_state_dict(loaded[name], strict=False)


def _model_state(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds of the model: all of it, or the adapters of a frozen one."""
    if trainer.adapted is not None:
        return trainer.adapted.sharded()
    return model_state(trainer.chunks)


def rng_state() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and the device's generators, and of Megatron's streams."""
    version, state, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    streams = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": [version, list(state), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "device": _text(megatron_random._get_cuda_rng_state()),
        "streams": {name: _text(state) for name, state in streams.items()},
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Inverse of :func:`rng_state`: every generator continues bit for bit from ``state``."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = state["numpy"]
    key = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**legacy, "state": {**legacy["state"], "key": key}})
    # Without CUDA the device's generator is torch's CPU generator.
    megatron_random._set_cuda_rng_state(_tensor(state["device"]))
    torch.set_rng_state(_tensor(state["torch"]))
    streams = {name: _tensor(text) for name, text in state["streams"].items()}
    tensor_parallel.get_cuda_rng_tracker().set_states(streams)


def _text(state: torch.Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()


def facts(trainer: Trainer) -> dict[str, Any]:
    """Of a manifest: the trainer's counts, model, layout and settings."""
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
    counted = optimizer_steps(trainer.optimizer)
    if counted - {trainer.step_count}:
        raise CheckpointError(
            f"the optimizer counts {sorted(counted)} steps, the trainer {trainer.step_count}"
        )


def check_model(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for another model or reference policy; log other optimizer settings, which are allowed."""
    if different := _differences(manifest["model"], _model_facts(trainer)):
        raise CheckpointError(f"{folder} holds another model: {'; '.join(different)}")
    if "reference_sha256" not in manifest:
        raise CheckpointError(
            f"{folder}: manifest.json has no reference_sha256, expected that of the reference policy or null; a "
            "version before the first release wrote it"
        )
    saved, present = manifest["reference_sha256"], trainer.reference_sha256
    # One that only one of both has is a difference of the configuration, which RunState.check_identity names.
    if saved is not None and present is not None and saved != present:
        raise CheckpointError(
            f"{folder} was trained with another reference policy: the SHA-256 of what the run started from "
            f"(model.hf_checkpoint, lora.start_from) is {present} here and {saved} in the checkpoint"
        )
    changed = _differences(manifest["optimizer"], trainer.config.optimizer.model_dump())
    if changed and trainer.topology.rank == 0:
        log.warning("resuming with other optimizer settings: %s", "; ".join(changed))


def _restore_generators(trainer: Trainer, manifest: dict[str, Any], folder: Path) -> None:
    """Set this rank's random generators to the saved state; under another layout than the saved one, seed them
    from the run's seed and the step count. Collective."""
    saved, topology = Layout(**manifest["layout"]), trainer.topology
    if saved == trainer.layout:
        path = folder / saving.rng_file(topology.rank)
        restore_rng_state(
            collectives.on_every_rank(
                lambda: json.loads(path.read_text(encoding="utf-8")), error=CheckpointError
            )
        )
        return
    seed = (trainer.config.run.seed + _SEED_STRIDE * trainer.step_count) % 2**31
    platform.seed_everything(seed)
    if topology.rank == 0:
        log.info(
            "%s was written under the layout %s, this run has %s: random generators start from seed %d",
            folder,
            saved.describe(),
            trainer.layout.describe(),
            seed,
        )


def _model_facts(trainer: Trainer) -> dict[str, Any]:
    """Properties of the model that a resumed run must not change."""
    shape = json.loads(json.dumps(asdict(trainer.shape)))
    adapters = {} if trainer.adapted is None else trainer.adapted.facts()
    return {**shape, "dtype": str(trainer.dtype).removeprefix("torch."), **adapters}


def _differences(saved: dict[str, Any], present: dict[str, Any]) -> list[str]:
    names = sorted(saved.keys() | present.keys())
    return [
        f"{name} is {present.get(name)!r} here and {saved.get(name)!r} in the checkpoint"
        for name in names
        if saved.get(name) != present.get(name)
    ]
