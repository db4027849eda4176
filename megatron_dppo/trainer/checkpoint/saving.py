"""A save that needs neither the trainer nor its collectives: copying, writing, agreeing, publishing.

It may run in a thread of its own on every rank. All that it says to other ranks goes through a gloo
group that nothing else uses meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.checkpoint_conversion.dist_reading import TensorBlock
from megatron_dppo.checkpoint_conversion.dist_writing import (
    BlockFile,
    HashedFile,
    StoredItem,
    write_hashed,
    write_headers,
)
from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.scratch import aligned
from megatron_dppo.trainer import collectives, platform
from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, StoredCheckpoint

log = logging.getLogger(__name__)

MIB = 2**20
Fence = Callable[[ProcessGroup | None], None]
"""Raises on every rank of the group (None: all) what forbids a change in the directory. Collective over the group."""


@dataclass
class RankPart:
    """What this rank writes.

    ``blocks``: elements on the CPU, or wherever the trainer holds them. ``written``: bytes of blocks so far.
    """

    blocks: Sequence[tuple[TensorBlock, Tensor]]
    objects: dict[str, Any]
    generators: str
    written: int = field(default=0)

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(block.bytes for block, _ in self.blocks)


@dataclass(frozen=True)
class Saved:
    """A published checkpoint. ``bytes``: of all its files; ``seconds``: from the first byte to its name."""

    path: Path
    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveTarget:
    """Where a save goes, and how much room it needs and had, bytes."""

    folders: CheckpointDirectory
    partial: StoredCheckpoint
    needed: int
    free: int


@dataclass(eq=False)
class SaveTask:
    """One save of one rank. ``run`` is collective over ``group``.

    Args:
        target: the unfinished folder.
        part: what this rank writes.
        manifest: all but the files; of global rank 0.
        group: gloo, of all ranks, in their order.
        fence: called before anything gets its name or is deleted.
        published: called with the step on rank 0 once the checkpoint has its name.
        suspect: publish under a name that no start loads, and leave the other checkpoints as they are.
    """

    target: SaveTarget
    part: RankPart
    manifest: dict[str, Any]
    group: ProcessGroup
    fence: Fence
    published: Callable[[int], None]
    suspect: bool = False

    def run(self) -> Saved:
        """Write, publish, then delete the older ones beyond what is kept.

        Raises CheckpointError on every rank where one could not write; FencedError where another start took over.
        """
        began = time.perf_counter()
        partial, folders = self.target.partial, self.target.folders
        try:
            path, size = self._write_and_publish()
        except CheckpointError as error:
            if self.group.rank() == 0:
                folders.discard(partial)
            raise CheckpointError(
                f"can't save step {partial.step} in {folders.directory}: {error}; it needs about "
                f"{self.target.needed / MIB:.1f} MiB, {self.target.free / MIB:.1f} MiB were free; older "
                "checkpoints are as they were"
            ) from error
        if not self.suspect:
            self.fence(self.group)
            collectives.on_rank_0(self._prune, self.group, error=CheckpointError)
        return Saved(path, partial.step, size, time.perf_counter() - began)

    def _write_and_publish(self) -> tuple[Path, int]:
        folder = self.target.partial.path
        if self.target.free < self.target.needed:
            raise CheckpointError(os.strerror(errno.ENOSPC))
        records, items = collectives.on_every_rank(
            lambda: self._write(folder), self.group, error=CheckpointError
        )
        parts = collectives.all_gather_json(records, self.group)
        # To rank 0 alone, which writes the headers: the lists grow with the number of ranks.
        every = collectives.gather_json(items, self.group)
        headers = collectives.on_rank_0(
            lambda: self._write_headers(folder, every), self.group, error=CheckpointError
        )
        files = {name: record for part in (*parts, headers) for name, record in part.items()}
        self.fence(self.group)
        # Fenced just now: writing takes minutes, in which another start may have taken the run.
        path = collectives.on_rank_0(
            lambda: self._publish(files), self.group, error=CheckpointError
        )
        return Path(path), sum(record["bytes"] for record in files.values())

    def _write(self, folder: Path) -> tuple[dict[str, Any], list[StoredItem]]:
        rank = self.group.rank()
        path = folder / f"__{rank}_0.distcp"
        with HashedFile(path) as hashed:
            file = BlockFile(hashed)
            for block, values in self.part.blocks:
                # Block by block: without a copy beforehand the host never holds more than one.
                file.add(block, values.cpu())
                self.part.written += block.bytes
            for key, value in self.part.objects.items():
                file.add_object(key, value)
        generators = write_hashed(folder / rng_file(rank), self.part.generators.encode())
        return {path.name: hashed.record, rng_file(rank): generators}, file.items

    def _write_headers(self, folder: Path, every: list[list[StoredItem]] | None) -> dict[str, Any]:
        assert every is not None, "global rank 0 has all ranks' items"
        items = (item for rank in every for item in rank)
        return write_headers(folder, items, self.target.partial.step)

    def _publish(self, files: dict[str, Any]) -> str:
        partial, content = self.target.partial, {**self.manifest, "files": files}
        path = self.target.folders.publish(partial, content, suspect=self.suspect)
        if not self.suspect:
            self.published(partial.step)
        return str(path)

    def _prune(self) -> None:
        try:
            self.target.folders.prune()
        except OSError as error:
            log.warning("can't delete old checkpoints: %s", error)


def rng_file(rank: int) -> str:
    """Name of the file of a rank's random generators."""
    return f"rng_{rank:05d}.json"


_SHOWN_AFTER_S = 1.0
_POLL_S = 0.2
# For this rank's thread to end once another rank's has failed.
_END_S = 10.0


class PendingSave:
    """Runs ``task`` in a thread from construction on."""

    def __init__(self, task: SaveTask) -> None:
        self._task = task
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        # A daemon: where other ranks died, this one must be able to end.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._saved = self._task.run()
        except BaseException as error:
            # Whatever it is: a thread that ended without a word would keep the other ranks waiting.
            self._error = error

    def report(self) -> dict[str, Any] | None:
        """For the other ranks, as JSON: None while it is being written, else whether and why it failed."""
        if self._error is not None:
            expected = isinstance(self._error, (CheckpointError, FencedError))
            kind = "" if expected else f"{type(self._error).__name__}: "
            return {
                "error": f"{kind}{self._error}",
                "fenced": isinstance(self._error, FencedError),
            }
        return None if self._saved is None else {"error": None, "fenced": False}

    def settle(self, reports: list[dict[str, Any] | None]) -> Saved | None:
        """What was saved, once every rank has reported; None before.

        Raises CheckpointError where a rank failed, FencedError where the run was succeeded.
        """
        failed = [report for report in reports if report is not None and report["error"]]
        if failed:
            self._thread.join(_END_S)
            kind = FencedError if failed[0]["fenced"] else CheckpointError
            raise kind(failed[0]["error"]) from self._error
        return None if None in reports else self._saved

    def wait(self) -> None:
        """Wait for this rank's thread, which waits for the others'; the progress is shown."""
        self._thread.join(_SHOWN_AFTER_S)
        if not self._thread.is_alive():
            return
        part, step = self._task.part, self._task.target.partial.step
        with progress(f"checkpoint of step {step}, MiB of this rank", part.bytes // MIB) as bar:
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
                bar.update(completed=part.written // MIB)

    def abandon(self) -> None:
        """Wait for this rank's thread where nobody will ask for its result any more."""
        if self._error is None:
            self.wait()
        if self._error is not None:
            log.warning("the checkpoint in the making was not saved: %s", self._error)


class HostCopy:
    """One flat buffer that holds a rank's blocks; kept between saves, which all take the same.

    Fresh memory costs several times what the copy into it does, and more where it is pinned for a GPU.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(
        self, blocks: Sequence[tuple[TensorBlock, Tensor]]
    ) -> list[tuple[TensorBlock, Tensor]]:
        """``blocks`` with their elements copied into the buffer. What an earlier call returned is overwritten."""
        starts, end = aligned([block.bytes for block, _ in blocks])
        if self._buffer.numel() < end:
            # The old one is let go of first: two would double the memory.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = platform.host_buffer(end)
        copies = []
        for start, (block, values) in zip(starts, blocks, strict=True):
            copy = self._buffer[start : start + block.bytes].view(block.dtype).view(block.box.sizes)
            copy.copy_(values, non_blocking=True)
            copies.append((block, copy))
        platform.wait_for_copies()
        return copies
