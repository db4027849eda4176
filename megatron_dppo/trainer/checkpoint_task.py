"""The part of a save that needs neither the trainer nor its collectives: writing, agreeing, publishing.

It may run in a thread of its own on every rank. All that it says to other ranks goes through a gloo
group that nothing else uses meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dppo.checkpoint_conversion.dist_blocks import Block
from megatron_dppo.checkpoint_conversion.dist_writing import (
    BlockFile,
    HashedFile,
    StoredItem,
    write_hashed,
    write_headers,
)
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.checkpoint_directory import CheckpointDirectory, StoredCheckpoint
from megatron_dppo.trainer.collectives import (
    all_gather_json,
    gather_json,
    on_every_rank,
    on_rank_0,
)

log = logging.getLogger(__name__)

MIB = 2**20
Fence = Callable[[ProcessGroup | None], None]
"""Raises on every rank of the group (None: all) what forbids a change in the directory. Collective over the group."""


@dataclass
class RankPart:
    """What this rank writes.

    ``blocks``: elements on the CPU, or wherever the trainer holds them. ``written``: bytes of blocks so far.
    """

    blocks: list[tuple[Block, Tensor]]
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
class Place:
    """Where a save goes, and how much room it needs and had, bytes."""

    folders: CheckpointDirectory
    partial: StoredCheckpoint
    needed: int
    free: int


class SaveTask:
    """One save of one rank. ``run`` is collective over ``group``.

    Args:
        place: the unfinished folder.
        part: what this rank writes.
        manifest: all but the files; of global rank 0.
        group: gloo, of all ranks, in their order.
        fence: called before anything gets its name or is deleted.
        published: called with the step on rank 0 once the checkpoint has its name.
    """

    def __init__(
        self,
        place: Place,
        part: RankPart,
        manifest: dict[str, Any],
        group: ProcessGroup,
        fence: Fence,
        published: Callable[[int], None],
    ) -> None:
        self.place = place
        self.part = part
        self._manifest = manifest
        self._group = group
        self._fence = fence
        self._published = published

    def run(self) -> Saved:
        """Write, publish, then delete the older ones beyond what is kept.

        Raises CheckpointError on every rank where one could not write; FencedError where another start took over.
        """
        began = time.perf_counter()
        partial, folders = self.place.partial, self.place.folders
        try:
            path, size = self._write_and_publish()
        except CheckpointError as error:
            if self._group.rank() == 0:
                folders.discard(partial)
            raise CheckpointError(
                f"can't save step {partial.step} in {folders.directory}: {error}; it needs about "
                f"{self.place.needed / MIB:.1f} MiB, {self.place.free / MIB:.1f} MiB were free; older "
                "checkpoints are as they were"
            ) from error
        self._fence(self._group)
        on_rank_0(self._prune, self._group, error=CheckpointError)
        return Saved(path, partial.step, size, time.perf_counter() - began)

    def _write_and_publish(self) -> tuple[Path, int]:
        folder = self.place.partial.path
        if self.place.free < self.place.needed:
            raise CheckpointError(os.strerror(errno.ENOSPC))
        own, items = on_every_rank(lambda: self._write(folder), self._group, error=CheckpointError)
        parts = all_gather_json(own, self._group)
        every = gather_json(items, self._group)
        headers = on_rank_0(
            lambda: self._write_headers(folder, every), self._group, error=CheckpointError
        )
        files = {name: record for part in (*parts, headers) for name, record in part.items()}
        self._fence(self._group)
        path = on_rank_0(lambda: self._publish(files), self._group, error=CheckpointError)
        return Path(path), sum(record["bytes"] for record in files.values())

    def _write(self, folder: Path) -> tuple[dict[str, Any], list[StoredItem]]:
        rank = self._group.rank()
        path = folder / f"__{rank}_0.distcp"
        with HashedFile(path) as hashed:
            file = BlockFile(hashed)
            for block, values in self.part.blocks:
                file.add(block, values.cpu())
                self.part.written += block.bytes
            for key, value in self.part.objects.items():
                file.add_object(key, value)
        generators = write_hashed(folder / rng_file(rank), self.part.generators.encode())
        return {path.name: hashed.record, rng_file(rank): generators}, file.items

    def _write_headers(self, folder: Path, every: list[list[StoredItem]] | None) -> dict[str, Any]:
        assert every is not None, "global rank 0 has all ranks' items"
        items = (item for rank in every for item in rank)
        return write_headers(folder, items, self.place.partial.step)

    def _publish(self, files: dict[str, Any]) -> str:
        path = self.place.folders.publish(self.place.partial, {**self._manifest, "files": files})
        self._published(self.place.partial.step)
        return str(path)

    def _prune(self) -> None:
        try:
            self.place.folders.prune()
        except OSError as error:
            log.warning("can't delete old checkpoints: %s", error)


def rng_file(rank: int) -> str:
    """Name of the file of a rank's random generators."""
    return f"rng_{rank:05d}.json"
