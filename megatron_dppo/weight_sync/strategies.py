"""The table of strategies, by their name in the configuration (``weight_sync.strategy``), and the strategies that send
whole tensors in buckets: ``tensor`` and ``disk``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.changes import changes_header, item_bytes
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.shards import adjacent
from megatron_dppo.engine.shared_buckets import shared_empty
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync import verification
from megatron_dppo.weight_sync.engines import GRACE_S, Bucket, Digests, Engines, on_this_host
from megatron_dppo.weight_sync.phases import Phases
from megatron_dppo.weight_sync.sent_weights import SentWeights
from megatron_dppo.weight_sync.shards import ShardStrategy
from megatron_dppo.weight_sync.source import Plan, WeightSource
from megatron_dppo.weight_sync.strategy import Strategy, Streamed


class BucketStrategy(Strategy):
    """Gathers whole tensors in buckets, each on one rank, which sends the bucket to the engines.

    Attributes:
        spread: whether the rank that holds most of a bucket sends it. If not, rank 0 sends all buckets.
        dtype: dtype of the trainer's weights. Some tensors are sent in another dtype (``EngineTensors.sent_dtype``).
    """

    spread = False

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self.dtype: torch.dtype = getattr(torch, source.dtype_name)
        self.buckets: Plan = source.plan(self.bucket_bytes, spread=self.spread)
        self._whole_bytes = 0

    def attach(self, engines: Engines) -> None:
        if self.rank == 0:
            self._whole_bytes = self._count_bytes(engines)
        if self.sent_weights is not None:
            # The engines' loaders decide the form of buckets.
            self.sent_weights = SentWeights()
        super().attach(engines)

    @property
    def sends(self) -> bool:
        """Whether the plan has buckets that this rank sends."""
        return any(bucket.receiver == self.rank for bucket in self.buckets)

    @property
    def calls_engines(self) -> bool:
        return self.rank == 0 or self.sends

    @property
    def attached(self) -> Engines:
        """The engines, on a rank that has connections to them."""
        assert self.engines is not None
        return self.engines

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self.rank == 0:
            self.attached.each(lambda engine: engine.begin())

    def stream(
        self, source: WeightSource, phases: Phases, *, verify: bool, sends_changes: bool
    ) -> Streamed:
        expected_checksums = None
        if verify and self.engines is not None and self.sends:
            expected_checksums = verification.ExpectedByLayout(self.engines)
        if self.sent_weights is not None:
            self.sent_weights.begin(is_base=sends_changes)
        sent = 0
        received = 0
        buckets = source.gather(self.buckets)
        while True:
            with phases.timed("gather"):
                bucket = next(buckets, None)
            if bucket is None:
                break
            received += bucket.received
            # Gather the remaining buckets after a failure too: the other ranks wait in this collective.
            if phases.error is not None:
                continue
            if bucket.tensors:
                with phases.timed("transfer"):
                    encoded = self.attached.first.encode(bucket.tensors)
                sent += phases.run("transfer", self.send, encoded) or 0
                if expected_checksums is not None:
                    phases.run("hash", expected_checksums.add, encoded)
            # Abort immediately: engines may be waiting for this rank's next bucket.
            if phases.error is not None:
                self.abort()
        between_nodes = sent * len(self.foreign_hosts)
        if self.rank == 0:
            between_nodes += source.bytes_between_nodes(self.buckets)
        partials = None
        if expected_checksums is not None:
            partials = expected_checksums.partials()
        return Streamed(sent, received, between_nodes, partials)

    def send(self, bucket: Bucket) -> int:
        """Start to send a bucket that this rank gathered. Returns the number of bytes sent.

        The caller may change the bucket after two further calls.
        """
        raise NotImplementedError

    def end(self) -> None:
        self.attached.each(lambda engine: engine.end())

    def digests(self, partials: Sequence[list[Any]]) -> Digests:
        return verification.expected_digests(self.attached, partials)

    @property
    def whole_bytes(self) -> int:
        return self._whole_bytes

    def _count_bytes(self, engines: Engines) -> int:
        """Return the bytes of all buckets in the form that ``engines`` receive."""
        return sum(engines.first.planned_header(bucket).bytes for bucket in self.buckets)

    @property
    def foreign_hosts(self) -> list[str]:
        if self.engines is None or not self.sends:
            return []
        return self.engines.foreign_hosts


class Packer:
    """Packs the tensors of a bucket into the flat bytes that engines receive.

    ``pieces`` returns the 1-D ``uint8`` pieces of a bucket in the engines' order. If the pieces follow each other in
    memory, ``pack`` returns a view of them. Otherwise it copies them into one of two alternating buffers, so that the
    result of a call stays valid until the second call after it.
    """

    def __init__(self, pieces: Callable[[Bucket], list[Tensor]]) -> None:
        self._pieces = pieces
        self._buffers: list[Tensor | None] = [None, None]

    def pack(self, bucket: Bucket) -> Tensor:
        """Return the flat bytes, as a view if the bucket's pieces follow each other in memory."""
        pieces = self._pieces(bucket)
        flat = adjacent(pieces)
        if flat is None:
            return self._copied(pieces, _empty)
        return flat

    def copy(self, bucket: Bucket, allocate: Callable[[int, torch.device], Tensor]) -> Tensor:
        """Return the flat bytes in memory from ``allocate(bytes, device)``."""
        return self._copied(self._pieces(bucket), allocate)

    def _copied(
        self, pieces: list[Tensor], allocate: Callable[[int, torch.device], Tensor]
    ) -> Tensor:
        """Copy ``pieces`` into the buffer that the call before the last one used, or into a larger new one."""
        size = sum(piece.numel() for piece in pieces)
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < size:
            buffer = allocate(size, pieces[0].device)
            self._buffers[0] = buffer
        return torch.cat(pieces, out=buffer[:size])


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


class TensorStrategy(BucketStrategy):
    """Shares memory with engines on the sender's own host; nothing is transferred.

    On a CPU the bucket is copied into shared memory; on a GPU the engine opens it by CUDA IPC (not yet run on a GPU).
    Raises EngineMismatchError for an engine on another host.
    """

    # Every rank sends the buckets that it holds most of, in any order: an engine handles one request at a time, and
    # engines do not wait for each other.
    spread = True

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._packer = Packer(self._pieces)
        # The engines may still read the buffers of ``_packer``. So buckets are packed elsewhere to find their changes.
        self._comparison_packer = Packer(self._pieces)
        self._requests: dict[str, Future[None]] = {}

    def _pieces(self, bucket: Bucket) -> list[Tensor]:
        return self.attached.first.pieces(bucket)

    def attach(self, engines: Engines) -> None:
        for engine in engines.members:
            if not on_this_host(engine.url):
                raise EngineMismatchError(
                    f"weight_sync.strategy tensor: the engine at {engine.url} runs on another host "
                    f"than trainer rank {self.rank}; memory is shared within one host only, expected "
                    "strategy distributed or disk"
                )
        super().attach(engines)

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket into memory that engines can open. Make the engines load it after the previous bucket."""
        engines = self.attached
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        changes = None
        if self.sent_weights is not None:
            packed = self._comparison_packer.pack(bucket)
            changes = self.sent_weights.changes(packed, item_bytes(header))
        if changes is None:
            data = self._packer.copy(bucket, shared_empty)
        else:
            header = changes_header(header, changes.count)
            data = shared_empty(header.bytes, changes.values.device)
            torch.cat(changes.pieces(), out=data)
        self.arrive()
        self._requests = engines.start(lambda engine: engine.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        requests = self._requests
        self._requests = {}
        if requests:
            self.attached.arrive(requests, self.config.timeout_s, "loading shared tensors")

    def abort(self) -> None:
        """Use new buffers from here on: an engine may still be reading the old buffers."""
        # A request that is still on its way would load its bucket into the session that a caller opens next. The
        # requests of other ranks are not waited for.
        wait(self._requests.values(), GRACE_S)
        self._requests = {}
        self._packer = Packer(self._pieces)


class FolderStrategy(BucketStrategy):
    """Rank 0 writes a folder on shared storage, and the engines read the folder.

    This reaches engines that no group of processes reaches. The folder is removed when the engines have read it. By
    default it is in this host's memory. So EngineMismatchError is raised if no folder is configured and an engine is on
    another host.
    """

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._folder: Path | None = None

    def attach(self, engines: Engines) -> None:
        remote_urls = [e.url for e in engines.members if not on_this_host(e.url)]
        if remote_urls and self.config.directory is None:
            raise EngineMismatchError(
                f"weight_sync.strategy disk: the engine at {remote_urls[0]} runs on another host; expected "
                "weight_sync.directory, a folder that trainer and engines see under the same path"
            )
        super().attach(engines)

    def new_folder(self, name: str) -> Path:
        """Return a path for a new folder ``name``, in the configured folder, or in shared memory by default."""
        base = Path(self.config.directory or MEMORY)
        base.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{private_name()}{name}-", dir=base))
        return self._folder / name

    def remove_folder(self) -> None:
        """Remove the folder, if there is one."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


MEMORY = "/dev/shm"
"""Folder in the memory of this host, for engines on the same host."""


class DiskStrategy(FolderStrategy):
    """Sends the weights as a Hugging Face folder. This strategy is the slowest."""

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._path = Path()
        self._writing = ExitStack()
        self._writer: ShardedWriter | None = None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self.engines is None:
            return
        first_engine = self.engines.first
        tensors: dict[str, TensorSpec] = {}
        for bucket in self.buckets:
            gathered = [(t.name, t.shape) for t in bucket.tensors]
            for sent_name, dims in first_engine.sent_shapes(gathered):
                dtype = first_engine.tensors.sent_dtype(sent_name, self.dtype)
                for name in first_engine.inputs(sent_name):
                    tensors[name] = TensorSpec(tuple(dims), dtype)
        self._path = self.new_folder("weights")
        self._writer = self._writing.enter_context(ShardedWriter(self._path, tensors))

    def send(self, bucket: Bucket) -> int:
        assert self._writer is not None
        written = 0
        for name, tensor in bucket:
            for engine_name in self.attached.first.inputs(name):
                self._writer.write_rows(engine_name, 0, tensor)
                written += tensor.nbytes
        return written

    def end(self) -> None:
        self._writing.close()
        self.attached.each(lambda engine: engine.load_folder(str(self._path)))
        self.abort()

    def abort(self) -> None:
        self._writing.pop_all()
        self._writer = None
        self.remove_folder()


STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": ShardStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
