"""The table of strategies, by their name in the configuration (``weight_sync.strategy``), and the two small ones."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.weights import shared_empty
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.distributed import DistributedStrategy
from megatron_dppo.weight_sync.engines import Bucket, Packer, Strategy, Transfer, on_this_host

MEMORY = "/dev/shm"


class TensorStrategy(Strategy):
    """Engines on the sender's own host open its memory; nothing is transferred.

    On a CPU the bucket is copied into shared memory, on a GPU the engine opens it by CUDA IPC (written,
    not yet run on one). Raises EngineMismatchError for an engine on another host.
    """

    # Every rank hands over its own buckets: engines take orders one at a time and don't wait for each other, so no
    # order is needed.
    spread = True

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        for engine in transfer.engines.members:
            if not on_this_host(engine.url):
                raise EngineMismatchError(
                    f"weight_sync.strategy tensor: the engine at {engine.url} runs on another host "
                    f"than trainer rank {transfer.rank}; memory is shared within one host only, expected "
                    "strategy distributed or disk"
                )
        self._packer = Packer(transfer.engines.first.pieces)
        self._in_flight: dict[str, Future[None]] = {}

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self._transfer.conducts:
            self._transfer.engines.each(lambda e: e.begin())

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket where engines can open it, and have them load it when the one before is."""
        engines = self._transfer.engines
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        data = self._packer.copy(bucket, shared_empty)
        self.arrive()
        self._in_flight = engines.start(lambda e: e.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        calls, self._in_flight = self._in_flight, {}
        if calls:
            timeout = self._transfer.timeout_s
            self._transfer.engines.arrive(calls, timeout, "loading shared tensors", lambda: None)

    def end(self) -> None:
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Drop the buffers: an engine that loads a bucket finishes it first."""
        self._in_flight = {}
        self._packer = Packer(self._transfer.engines.first.pieces)


class DiskStrategy(Strategy):
    """A Hugging Face folder that the engines read, on storage that all see; rank 0 writes all.

    The slowest, and the one that works wherever a file does: through a shared file system it reaches engines that no
    broadcast group reaches. The folder is removed when they have read it. Raises EngineMismatchError where no folder
    is configured and an engine can't see this host's memory.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        require_shared_folder(transfer)
        self._folder: Path | None = None
        self._writing = ExitStack()
        self._writer: ShardedWriter | None = None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        first = self._transfer.engines.first
        tensors = {
            name: TensorSpec(tensor.shape, self._transfer.dtype)
            for bucket in self._transfer.plan
            for tensor in bucket.tensors
            for name in first.inputs(tensor.name)
        }
        self._folder = new_folder(self._transfer, "weights")
        self._writer = self._writing.enter_context(ShardedWriter(self._folder / "hf", tensors))

    def send(self, bucket: Bucket) -> int:
        assert self._writer is not None
        written = 0
        for name, tensor in bucket:
            for each in self._transfer.engines.first.inputs(name):
                self._writer.write_rows(each, 0, tensor)
                written += tensor.nbytes
        return written

    def end(self) -> None:
        assert self._folder is not None
        self._writing.close()
        folder = str(self._folder / "hf")
        self._transfer.engines.each(lambda e: e.load_folder(folder))
        self._remove()

    def abort(self) -> None:
        self._writing.pop_all()
        self._remove()

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


def new_folder(transfer: Transfer, purpose: str) -> Path:
    """A new one in the configured folder, or in memory."""
    base = Path(transfer.directory or MEMORY)
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{private_name()}{purpose}-", dir=base))


STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": DistributedStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
