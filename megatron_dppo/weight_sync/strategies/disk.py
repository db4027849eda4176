"""Strategy ``disk``: a Hugging Face folder that the engines read, on storage that all see.

The slowest, and the one that works wherever a file does: through a shared file system it reaches
engines that no broadcast group reaches.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoint_conversion.hf_io import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.engines import on_this_host
from megatron_dppo.weight_sync.interfaces import Bucket, Transfer

MEMORY = "/dev/shm"


class DiskStrategy:
    """See ``interfaces.Strategy``; rank 0 writes all. The folder is removed when the engines have read it.

    Raises EngineMismatchError where no folder is configured and an engine can't see this host's memory.
    """

    spread = False
    copies = 1

    def __init__(self, transfer: Transfer) -> None:
        require_shared_folder(transfer)
        self._transfer = transfer
        self._folder: Path | None = None
        self._writing = ExitStack()
        self._writer: ShardedWriter | None = None

    def meeting_point(self) -> Any:
        """None: the ranks need not know each other."""
        return None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Open a new folder's files."""
        first = self._transfer.engines.first
        tensors = {
            name: TensorSpec(tensor.shape, self._transfer.dtype)
            for bucket in self._transfer.plan
            for tensor in bucket.tensors
            for name in first.inputs(tensor.name)
        }
        where = self._transfer.directory or MEMORY
        Path(where).mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{private_name()}weights-", dir=where))
        self._writer = self._writing.enter_context(ShardedWriter(self._folder / "hf", tensors))

    def send(self, bucket: Bucket) -> int:
        """Write the bucket."""
        assert self._writer is not None
        written = 0
        for name, tensor in bucket:
            for each in self._transfer.engines.first.inputs(name):
                self._writer.write(each, tensor)
                written += tensor.nbytes
        return written

    def arrive(self) -> None:
        """All is written when ``send`` returns."""

    def end(self) -> None:
        """Publish the folder and have the engines load it; then remove it."""
        assert self._folder is not None
        self._writing.close()
        folder = str(self._folder / "hf")
        self._transfer.engines.each(lambda e: e.load_folder(folder))
        self._remove()

    def abort(self) -> None:
        """Remove what was written."""
        self._writing.pop_all()
        self._remove()

    def close(self) -> None:
        """As ``abort``."""
        self.abort()

    def _remove(self) -> None:
        self._writer = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def require_shared_folder(transfer: Transfer) -> None:
    """Raise EngineMismatchError where an engine runs elsewhere and no folder is configured that it sees."""
    remote = [e.url for e in transfer.engines.members if not on_this_host(e.url)]
    if remote and transfer.directory is None:
        raise EngineMismatchError(
            f"weight_sync.strategy disk: the engine at {remote[0]} runs on another host; expected "
            "weight_sync.directory, a folder that trainer and engines see under the same path"
        )
