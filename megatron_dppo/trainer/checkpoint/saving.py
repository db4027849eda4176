"""One save of a checkpoint, without the trainer: copy, write, exchange file records, publish.

On every rank a save may run in a thread beside training. The collectives of a save use a gloo group that nothing else
uses at the same time, so they cannot mix with the collectives of training.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.lease import FencedError
from megatron_dppo.system.scratch import aligned_offsets
from megatron_dppo.trainer import collectives, platform
from megatron_dppo.trainer.checkpoint.directory import CheckpointDirectory, StoredCheckpoint

log = logging.getLogger(__name__)

MIB = 2**20
Fence = Callable[[ProcessGroup | None], None]
"""Function that raises FencedError on every rank of the group (None: all ranks) if another start of the run took over.
Then this start must not change the directory. Collective over the group."""


@dataclass
class RankPart:
    """The part of a checkpoint that this rank writes.

    Attributes:
        blocks: the blocks with their values, in a host copy or in the trainer's own tensors.
        objects: Megatron's extra states, by key.
        generators: states of the random generators, as JSON.
        written: bytes of blocks written so far.
    """

    blocks: Sequence[tuple[TensorBlock, Tensor]]
    objects: dict[str, Any]
    generators: str
    written: int = field(default=0)

    @property
    def bytes(self) -> int:
        """Total bytes of all blocks."""
        return sum(block.bytes for block, _ in self.blocks)


@dataclass(frozen=True)
class Saved:
    """A published checkpoint. ``bytes``: size of all its files; ``seconds``: duration of the save until the rename."""

    path: Path
    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveTarget:
    """The folder that a save writes to, and its disk space in bytes.

    ``needed``: the space that the save needs. ``free``: the space that was free before the save.
    """

    folders: CheckpointDirectory
    partial: StoredCheckpoint
    needed: int
    free: int


@dataclass(eq=False)
class SaveTask:
    """One rank's part in a save. ``run`` is collective over ``group``.

    Args:
        target: the partial folder and its disk space.
        part: the blocks, objects and generator states that this rank writes.
        manifest: the manifest without its ``files``. Only global rank 0 uses its manifest.
        group: a gloo group of all ranks, in the order of global ranks.
        fence: called before the checkpoint is published, and before older checkpoints are deleted.
        published: called on rank 0 with the step once the checkpoint has its final name.
        suspect: publish under a name that no start loads, and delete no checkpoints except older suspect ones.
    """

    target: SaveTarget
    part: RankPart
    manifest: dict[str, Any]
    group: ProcessGroup
    fence: Fence
    published: Callable[[int], None]
    suspect: bool = False

    def run(self) -> Saved:
        """Write and publish the checkpoint, then delete the oldest checkpoints, so that ``keep`` remain.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
            FencedError: another start of the run took over.
        """
        start_time = time.perf_counter()
        stored = self.target.partial
        folders = self.target.folders
        try:
            path, size = self._write_and_publish()
        except CheckpointError as error:
            if self.group.rank() == 0:
                folders.discard(stored)
            raise CheckpointError(
                f"can't save step {stored.step} in {folders.directory}: {error}; it needs about "
                f"{self.target.needed / MIB:.1f} MiB, {self.target.free / MIB:.1f} MiB were free; older "
                "checkpoints are as they were"
            ) from error
        if not self.suspect:
            self.fence(self.group)
            collectives.on_rank_0(self._prune, self.group, error=CheckpointError)
        return Saved(path, stored.step, size, time.perf_counter() - start_time)

    def _write_and_publish(self) -> tuple[Path, int]:
        """Return the path of the published checkpoint and the size of all its files. Collective."""
        folder = self.target.partial.path
        if self.target.free < self.target.needed:
            raise CheckpointError(os.strerror(errno.ENOSPC))
        records, items = collectives.on_every_rank(
            partial(self._write, folder), self.group, error=CheckpointError
        )
        failpoint("checkpoint/written")
        records_of_ranks = collectives.all_gather_json(records, self.group)
        # Gather the items only on rank 0: only rank 0 writes the headers, and all ranks together have many items.
        items_of_ranks = collectives.gather_json(items, self.group)
        header_records = collectives.on_rank_0(
            partial(self._write_headers, folder, items_of_ranks), self.group, error=CheckpointError
        )
        files: dict[str, Any] = {}
        for file_records in (*records_of_ranks, header_records):
            files.update(file_records)
        # Check the fence immediately before publishing: another start may have taken over during the minutes of
        # writing.
        self.fence(self.group)
        path = collectives.on_rank_0(
            partial(self._publish, files), self.group, error=CheckpointError
        )
        return Path(path), sum(record["bytes"] for record in files.values())

    def _write(self, folder: Path) -> tuple[dict[str, Any], list[StoredItem]]:
        """Write this rank's files; return size and SHA-256 of each file by name, and the items for the headers."""
        rank = self.group.rank()
        # torch.distributed.checkpoint names the files of a checkpoint so.
        path = folder / f"__{rank}_0.distcp"
        with HashedFile(path) as hashed:
            file = BlockFile(hashed)
            for block, values in self.part.blocks:
                failpoint("checkpoint/block")
                # Copy one block at a time, so that a save without a host copy holds only one block on the host.
                file.add(block, values.cpu())
                self.part.written += block.bytes
            for key, value in self.part.objects.items():
                file.add_object(key, value)
        rng_record = write_hashed(folder / rng_file(rank), self.part.generators.encode())
        return {path.name: hashed.record, rng_file(rank): rng_record}, file.items

    def _write_headers(
        self, folder: Path, items_of_ranks: list[list[StoredItem]] | None
    ) -> dict[str, Any]:
        """Write the files that say where each block is stored; return their records by name."""
        assert items_of_ranks is not None, "global rank 0 has all ranks' items"
        items = itertools.chain.from_iterable(items_of_ranks)
        return write_headers(folder, items, self.target.partial.step)

    def _publish(self, files: dict[str, Any]) -> str:
        """Publish the folder with a manifest of ``files``, and return its path."""
        stored = self.target.partial
        manifest = {**self.manifest, "files": files}
        path = self.target.folders.publish(stored, manifest, suspect=self.suspect)
        if not self.suspect:
            failpoint("checkpoint/remember")
            self.published(stored.step)
        return str(path)

    def _prune(self) -> None:
        try:
            self.target.folders.prune()
        except OSError as error:
            log.warning("can't delete old checkpoints: %s", error)


def rng_file(rank: int) -> str:
    """Return the name of the file that holds the states of a rank's random generators."""
    return f"rng_{rank:05d}.json"


_PROGRESS_AFTER_S = 1.0
"""Time after which ``PendingSave.wait`` shows a progress bar."""
_POLL_S = 0.5
_END_S = 10.0
"""Time that a rank waits for its own save to end after another rank's save failed."""


class SaveThread:
    """The thread that makes all saves of a run, one after another.

    With a new thread for each save, the process would grow. malloc has up to eight arenas per core, and gives a new
    thread any of them. Each arena keeps the memory of the largest block that its threads have written.
    """

    def __init__(self) -> None:
        self._saves: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The thread is a daemon, so that this process can exit when other ranks have died.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)

    def start(self, save: Callable[[], None]) -> None:
        """Call ``save`` in the thread after all earlier saves. ``save`` must not raise."""
        if not self._thread.is_alive():
            self._thread.start()
        self._saves.put(save)

    def close(self) -> None:
        """Let the thread end after the saves that were started; do not wait for it."""
        self._saves.put(None)

    def _run(self) -> None:
        while (save := self._saves.get()) is not None:
            save()


class PendingSave:
    """A save that runs in ``thread``; the constructor starts it."""

    def __init__(self, task: SaveTask, thread: SaveThread) -> None:
        self._task = task
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        thread.start(self._run)

    def _run(self) -> None:
        try:
            self._saved = self._task.run()
        except BaseException as error:
            # Keep any exception for ``report``: without a report of this rank, the other ranks would wait forever.
            self._error = error
        finally:
            self._ended.set()

    def report(self) -> dict[str, Any] | None:
        """Return this rank's result as JSON for the other ranks: None during the save, then a dictionary.

        ``error`` in the dictionary is the message of the save's error, or None after a successful save.
        """
        if self._error is not None:
            is_expected = isinstance(self._error, (CheckpointError, FencedError))
            prefix = "" if is_expected else f"{type(self._error).__name__}: "
            return {
                "error": f"{prefix}{self._error}",
                "fenced": isinstance(self._error, FencedError),
            }
        if self._saved is None:
            return None
        return {"error": None, "fenced": False}

    def outcome(self, reports: list[dict[str, Any] | None]) -> Saved | None:
        """Return the published checkpoint if every rank has reported its result, else None.

        Args:
            reports: ``report`` of every rank, in the order of ranks.

        Raises:
            CheckpointError: a rank failed.
            FencedError: another start of the run took over.
        """
        failures = [report for report in reports if report is not None and report["error"]]
        if failures:
            self._ended.wait(_END_S)
            error_type = FencedError if failures[0]["fenced"] else CheckpointError
            raise error_type(failures[0]["error"]) from self._error
        if None in reports:
            return None
        return self._saved

    def wait(self, has_ended: Callable[[], bool]) -> None:
        """Call ``has_ended`` until it returns True, and show a progress bar.

        ``has_ended`` is called every half second, and as soon as this rank's save has ended.
        """
        self._ended.wait(_PROGRESS_AFTER_S)
        if has_ended():
            return
        part = self._task.part
        step = self._task.target.partial.step
        with progress(f"checkpoint of step {step}, MiB of this rank", part.bytes // MIB) as bar:
            while not has_ended():
                self._ended.wait(_POLL_S)
                bar.update(completed=part.written // MIB)

    def wait_and_log_error(self) -> None:
        """Wait for this rank's save at the end of a run, and log its error: no caller reads its result."""
        if self._error is None:
            self.wait(self._ended.is_set)
        if self._error is not None:
            log.warning("the checkpoint in the making was not saved: %s", self._error)


class HostCopy:
    """A copy of a rank's blocks in one flat host buffer. All saves need a buffer of the same size and use the same one.

    Allocating a buffer takes several times as long as the copy, and a pinned buffer for a GPU takes even longer.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(
        self, blocks: Sequence[tuple[TensorBlock, Tensor]]
    ) -> list[tuple[TensorBlock, Tensor]]:
        """Copy ``blocks`` into the buffer and return the copies. This overwrites the copies of an earlier call."""
        starts, end = aligned_offsets([block.bytes for block, _ in blocks])
        if self._buffer.numel() < end:
            # Free the old buffer first: holding both would double the memory.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = platform.host_buffer(end)
        copies = []
        for start, (block, values) in zip(starts, blocks, strict=True):
            copy = self._buffer[start : start + block.bytes].view(block.dtype).view(block.box.sizes)
            copy.copy_(values, non_blocking=True)
            copies.append((block, copy))
        platform.wait_for_copies()
        return copies
