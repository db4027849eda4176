"""The table of strategies, by their name in the configuration (``weight_sync.strategy``), and the strategies that
gather whole tensors on rank 0, which writes a folder."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weights import verification
from megatron_dppo.weights.distributed import DistributedStrategy
from megatron_dppo.weights.engines import Bucket, Digests, Engines, on_this_host
from megatron_dppo.weights.phases import Phases
from megatron_dppo.weights.shared_memory import TensorStrategy
from megatron_dppo.weights.source import Plan, WeightSource
from megatron_dppo.weights.strategy import Strategy, Streamed


class FolderStrategy(Strategy):
    """Rank 0 gathers whole tensors in buckets, and writes a folder on shared storage, which the engines read.

    This reaches engines that no group of processes reaches. The folder is removed when the engines have read it. By
    default it is in this host's memory.

    Attributes:
        dtype: dtype of the trainer's weights. Some tensors are sent in another dtype (``EngineTensors.sent_dtype``).
    """

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self.dtype: torch.dtype = getattr(torch, source.dtype_name)
        self.buckets: Plan = source.plan(self.bucket_bytes)
        self._folder: Path | None = None

    def attach(self, engines: Engines) -> None:
        for engine in engines.members:
            fault = self.reach_fault(engine.url, self.config, shares_devices=False)
            if fault is not None:
                raise EngineMismatchError(fault)
        super().attach(engines)

    @staticmethod
    def reach_fault(url: str, config: WeightSyncConfig, *, shares_devices: bool) -> str | None:
        if on_this_host(url) or config.directory is not None:
            return None
        return (
            f"weight_sync.strategy disk: the engine at {url} runs on another host than the trainer; expected "
            "weight_sync.directory, a folder that trainer and engines see under the same path"
        )

    def stream(
        self, source: WeightSource, phases: Phases, *, verify: bool, sends_changes: bool
    ) -> Streamed:
        expected_checksums = None
        if verify and self.engines is not None:
            expected_checksums = verification.ExpectedByLayout(self.engines)
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
                sent += phases.run("transfer", self.write, encoded) or 0
                if expected_checksums is not None:
                    phases.run("hash", expected_checksums.add, encoded)
            if phases.error is not None:
                self.abort()
        between_nodes = sent * len(self.foreign_hosts)
        if self.rank == 0:
            between_nodes += source.bytes_between_nodes(self.buckets)
        partials = None
        if expected_checksums is not None:
            partials = expected_checksums.partials()
        return Streamed(sent, received, between_nodes, partials)

    def write(self, bucket: Bucket) -> int:
        """Write, or keep, a bucket that this rank gathered. Returns the number of bytes."""
        raise NotImplementedError

    def digests(self, partials: Sequence[list[Any]]) -> Digests:
        return verification.expected_digests(self.attached, partials)

    @property
    def foreign_hosts(self) -> list[str]:
        return [] if self.engines is None else self.engines.foreign_hosts

    def new_folder(self, name: str) -> Path:
        """Return a path for a new folder ``name`` in ``WeightSyncConfig.update_folder``."""
        base = self.config.update_folder
        assert base is not None
        base.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{private_name()}{name}-", dir=base))
        return self._folder / name

    def remove_folder(self) -> None:
        """Remove the folder, if there is one."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class _UpdateAbortedError(Exception):
    """The update was aborted while its files were open."""


class DiskStrategy(FolderStrategy):
    """Sends the weights as a Hugging Face folder. This strategy is the slowest."""

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self._path = Path()
        self._tensors: dict[str, TensorSpec] = {}
        self._writing = ExitStack()
        self._writer: ShardedWriter | None = None

    def attach(self, engines: Engines) -> None:
        super().attach(engines)
        self._tensors.clear()
        for bucket in self.buckets:
            gathered = [(t.name, t.shape) for t in bucket.tensors]
            for sent_name, dims in engines.first.sent_shapes(gathered):
                dtype = engines.first.tensors.sent_dtype(sent_name, self.dtype)
                for name in engines.inputs(sent_name):
                    self._tensors[name] = TensorSpec(tuple(dims), dtype)

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self.engines is not None:
            self._path = self.new_folder("weights")
            writer = ShardedWriter(self._path, self._tensors)
            try:
                self._writer = self._writing.enter_context(writer)
            except CheckpointError as error:
                # The disk is full. Every rank hears of an OSError.
                raise OSError(errno.ENOSPC, str(error)) from error

    def write(self, bucket: Bucket) -> int:
        assert self._writer is not None
        written = 0
        for name, tensor in bucket:
            for engine_name in self.attached.inputs(name):
                self._writer.write_rows(engine_name, 0, tensor)
                written += tensor.nbytes
        return written

    def end(self) -> None:
        self._writing.close()
        self.attached.each(lambda engine: engine.load_folder(str(self._path)))
        self.abort()

    def abort(self) -> None:
        # The error lets the writer close its files without publishing them.
        with suppress(_UpdateAbortedError, OSError), self._writing.pop_all():
            raise _UpdateAbortedError
        self._writer = None
        self.remove_folder()

    @property
    def whole_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self._tensors.values())


STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": DistributedStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
