"""The table of strategies, by their name in the configuration (``weight_sync.strategy``).

Strategy ``distributed``: each bucket is one gloo or NCCL broadcast to all engines' ranks.

Every rank that holds weights sends its own: it gathers a bucket from the ranks that share its tensors, and
broadcasts it in a separate group with all engines. Rank 0 knows every bucket from the plan, so it tells the engines by
HTTP, in the plan's order, which broadcast to enter next. The engines load one bucket while all senders gather and hash
the next. So all engines enter the same broadcasts in the same order, which independent senders could not ensure.

A dead engine breaks its connections at once; a hung one exceeds the time limit of the request.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.engine.changes import changes_header
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.shared_buckets import shared_empty
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.system.network import is_loopback
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.broadcast_group import (
    Announcements,
    BroadcastGroup,
    call_off,
    in_background,
)
from megatron_dppo.weight_sync.engines import (
    ENGINE_FAULTS,
    Bucket,
    Packer,
    PlannedBucket,
    Strategy,
    Transfer,
    meeting_address,
    on_this_host,
)

log = logging.getLogger(__name__)

_WHOLE = -1
"""Announced in place of the number of changes of a bucket that is sent whole."""


class DistributedStrategy(Strategy):
    """Sends buckets by broadcasts. Groups live from one update to the next, and are opened again after an abort.

    A new group connects at once, by a bucket that changes nothing; otherwise NCCL would connect in the first real one.

    The configured time limit bounds each request to an engine: entering a group, and receiving and loading a bucket.
    """

    spread = True

    def __init__(self, transfer: Transfer) -> None:
        _require_routable([engine.url for engine in transfer.engines.members])
        super().__init__(transfer)
        self.copies = transfer.engines.ranks
        self._group: BroadcastGroup | None = None
        self._points: list[Any] = []
        self._packer = Packer(transfer.engines.first.pieces)
        self._in_flight: Future[None] | None = None
        self._conducting: Future[None] | None = None
        self._announcements: dict[str, Announcements] = {}

    def meeting_point(self) -> Any:
        """Return the address at which this rank's group meets; None on a rank that sends nothing."""
        if not self._transfer.sends:
            return None
        if self._group is None:
            engines = self._transfer.engines
            self._group = BroadcastGroup(
                ranks=engines.ranks,
                address=meeting_address([engine.url for engine in engines.members]),
                device=engines.first.device,
                timeout_s=self._transfer.timeout_s,
            )
        group = self._group
        return [group.address, group.port, group.name, group.backend]

    def begin(self, meeting_points: Sequence[Any]) -> None:
        new_points: list[str] = []
        if self._transfer.is_rank_0:
            former_points = self._points
            self._points = list(meeting_points)
            for point in meeting_points:
                if point is not None and point not in former_points:
                    self._invite(*point)
                    new_points.append(point[2])
            self._transfer.engines.each(lambda e: e.begin())
        if self._group is not None:
            self._group.wait(self._group.joined)
            connected = self._group.connect(self._transfer.engines.first.probe_header().bytes)
        for name in new_points:
            self._probe(name)
        if self._group is not None:
            self._group.wait(connected)
        if self._transfer.is_rank_0:
            self._conducting = in_background(self._conduct)

    def send(self, bucket: Bucket) -> int:
        """Wait for this rank's bucket before, then start the broadcast of this one."""
        assert self._group is not None
        data = self._packer.pack(bucket)
        if self._transfer.sent_weights is not None:
            changes = self._transfer.changes(bucket, data)
            self._group.announce(_WHOLE if changes is None else changes.count)
            if changes is not None:
                data = torch.cat(changes.pieces())
        self._sent()
        self._in_flight = self._group.broadcast(data)
        return data.numel()

    def arrive(self) -> None:
        self._sent()
        if self._conducting is not None:
            self._conducting.result()
            self._conducting = None

    def end(self) -> None:
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Break this rank's group, which frees the engines that wait in it; rank 0 also breaks the other groups."""
        if self._transfer.is_rank_0:
            self._call_off()
        self._in_flight = self._conducting = None
        self._points = []
        self._announcements.clear()
        if self._group is not None:
            self._group.abort()
            self._group = None

    def close(self) -> None:
        """Have the engines leave the groups; an engine that has ended has left already. Never raises."""
        for _, _, name, _ in filter(None, self._points):
            try:
                self._transfer.engines.each(partial(EngineWeights.close_group, name=name))
            except ENGINE_FAULTS as error:
                log.info("an engine did not leave the weight group: %s", error)
        self._points = []
        self.abort()

    def _invite(self, address: str, port: int, name: str, backend: str) -> None:
        engines = self._transfer.engines
        ranks = engines.first_ranks()
        size = engines.ranks + 1
        calls = engines.start(
            lambda e: e.open_group(address, port, name, backend, first_rank=ranks[e.url], size=size)
        )
        self._all_arrive(calls, f"opening the broadcast group {name}")

    def _probe(self, name: str) -> None:
        engines = self._transfer.engines
        header = engines.first.probe_header()
        calls = engines.start(lambda e: e.receive(header, name))
        self._all_arrive(calls, f"connecting the broadcast group {name}")

    def _conduct(self) -> None:
        for planned in self._transfer.plan:
            self._announce(planned)

    def _announce(self, planned: PlannedBucket) -> None:
        engines = self._transfer.engines
        name = self._points[planned.receiver][2]
        header = engines.first.planned_header(planned)
        if self._transfer.sent_weights is not None:
            count = self._announced_count(planned.receiver)
            if count != _WHOLE:
                header = changes_header(header, count)
        calls = engines.start(lambda e: e.receive(header, name))
        sender = f"trainer rank {planned.receiver}"
        self._all_arrive(calls, f"a broadcast of {header.bytes} bytes from {sender}")

    def _announced_count(self, sender: int) -> int:
        """Return how many changes the sender's next bucket has; _WHOLE if it is sent whole."""
        address, port, name, _ = self._points[sender]
        try:
            if name not in self._announcements:
                limit = self._transfer.timeout_s
                self._announcements[name] = Announcements(address, port, limit)
            return self._announcements[name].next()
        except ENGINE_FAULTS:
            # The other senders wait for engines that no call makes enter their broadcasts.
            self._call_off()
            raise

    def _all_arrive(self, calls: dict[str, Future[None]], step: str) -> None:
        self._transfer.engines.arrive(calls, self._transfer.timeout_s, step, self._call_off)

    def _call_off(self) -> None:
        for address, port, *_ in filter(None, self._points):
            call_off(address, port)

    def _sent(self) -> None:
        """Wait for the bucket in flight. A failure breaks the group, so that no engine waits in it."""
        if self._in_flight is None:
            return
        assert self._group is not None
        sent = self._in_flight
        self._in_flight = None
        try:
            self._group.wait(sent)
        except BaseException:
            self._group.abort()
            if self._conducting is not None:
                # Rank 0 made the HTTP calls, so its exception names the failing engine.
                self._conducting.result()
            raise


def _require_routable(urls: Sequence[str]) -> None:
    """Raise EngineMismatchError where servers of several hosts would meet at a loopback address."""
    at_loopback = [url for url in urls if is_loopback(str(urlsplit(url).hostname))]
    if at_loopback and len(at_loopback) < len(urls):
        elsewhere = next(url for url in urls if url not in at_loopback)
        raise EngineMismatchError(
            f"weight_sync.strategy distributed: the engine at {at_loopback[0]} listens on loopback, where the one at "
            f"{elsewhere} can't reach it; expected an address of this machine in engine.host"
        )


MEMORY = "/dev/shm"


class TensorStrategy(Strategy):
    """Shares memory with engines on the sender's own host; nothing is transferred.

    On a CPU the bucket is copied into shared memory; on a GPU the engine opens it by CUDA IPC (not yet run on a GPU).
    Raises EngineMismatchError for an engine on another host.
    """

    # Every rank sends its own buckets: engines handle one request at a time and do not wait for each other, so that
    # ranks may send in any order.
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
        self._compared = Packer(transfer.engines.first.pieces)
        self._in_flight: dict[str, Future[None]] = {}

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self._transfer.is_rank_0:
            self._transfer.engines.each(lambda e: e.begin())

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket where engines can open it, and have them load it after the previous one."""
        engines = self._transfer.engines
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        changes = None
        if self._transfer.sent_weights is not None:
            changes = self._transfer.changes(bucket, self._compared.pack(bucket))
        if changes is None:
            data = self._packer.copy(bucket, shared_empty)
        else:
            header = changes_header(header, changes.count)
            data = shared_empty(header.bytes, changes.values.device)
            torch.cat(changes.pieces(), out=data)
        self.arrive()
        self._in_flight = engines.start(lambda e: e.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        calls = self._in_flight
        self._in_flight = {}
        if calls:
            timeout = self._transfer.timeout_s
            self._transfer.engines.arrive(calls, timeout, "loading shared tensors")

    def end(self) -> None:
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Drop the buffers: an engine that loads a bucket finishes it first."""
        self._in_flight = {}
        self._packer = Packer(self._transfer.engines.first.pieces)


class DiskStrategy(Strategy):
    """Writes a Hugging Face folder on shared storage, from rank 0, which the engines read.

    This strategy is the slowest one, but a shared file system also reaches engines that no broadcast group reaches. The
    folder is removed when the engines have read it. Raises EngineMismatchError if no folder is configured and an engine
    cannot see this host's memory.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(transfer)
        require_shared_folder(transfer)
        self._folder: Path | None = None
        self._writing = ExitStack()
        self._writer: ShardedWriter | None = None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        first_engine = self._transfer.engines.first
        tensors: dict[str, TensorSpec] = {}
        for bucket in self._transfer.plan:
            gathered = [(t.name, t.shape) for t in bucket.tensors]
            for sent_name, dims in first_engine.sent_shapes(gathered):
                dtype = first_engine.tensors.sent_dtype(sent_name, self._transfer.dtype)
                for name in first_engine.inputs(sent_name):
                    tensors[name] = TensorSpec(tuple(dims), dtype)
        self._folder = new_folder(self._transfer, "weights")
        self._writer = self._writing.enter_context(ShardedWriter(self._folder / "hf", tensors))

    def send(self, bucket: Bucket) -> int:
        assert self._writer is not None
        written = 0
        for name, tensor in bucket:
            for engine_name in self._transfer.engines.first.inputs(name):
                self._writer.write_rows(engine_name, 0, tensor)
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
    """Raise EngineMismatchError if an engine runs on another host and no shared folder is configured."""
    remote = [e.url for e in transfer.engines.members if not on_this_host(e.url)]
    if remote and transfer.directory is None:
        raise EngineMismatchError(
            f"weight_sync.strategy disk: the engine at {remote[0]} runs on another host; expected "
            "weight_sync.directory, a folder that trainer and engines see under the same path"
        )


def new_folder(transfer: Transfer, purpose: str) -> Path:
    """Create a folder in the configured one, or in shared memory."""
    base = Path(transfer.directory or MEMORY)
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{private_name()}{purpose}-", dir=base))


STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": DistributedStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
