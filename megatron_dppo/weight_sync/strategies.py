"""The table of strategies, by their name in the configuration (``weight_sync.strategy``).

Strategy ``distributed``: each bucket is one gloo or NCCL broadcast to all engines' ranks.

Every rank that holds weights is a sender: it gathers a bucket from the ranks that share the bucket's tensors, and
broadcasts the bucket in a separate group with all engines. Rank 0 knows every bucket from the plan. It tells the
engines by HTTP which broadcast to enter next, in the plan's order. So all engines enter the broadcasts in one order;
the senders alone could not ensure this. The engines load one bucket while all senders gather and hash the next bucket.

Rank 0 notices a dead engine at once, by its broken connections, and a hung engine by the time limit of its request.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.engine.changes import changes_header
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.links import in_background
from megatron_dppo.engine.shared_buckets import shared_empty
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.broadcast_group import Announcements, BroadcastGroup, call_off
from megatron_dppo.weight_sync.engines import (
    ENGINE_FAULTS,
    GRACE_S,
    Bucket,
    Packer,
    PlannedBucket,
    Strategy,
    Transfer,
    meeting_address,
    on_this_host,
    require_routable,
)

log = logging.getLogger(__name__)

_WHOLE = -1
"""Announced in place of the number of changes of a bucket that is sent whole."""


class _MeetingPoint(NamedTuple):
    """The rendezvous of a sender's broadcast group, the group's name, and its backend of torch.distributed."""

    address: str
    port: int
    name: str
    backend: str


class DistributedStrategy(Strategy):
    """Sends buckets by broadcasts. Groups live from one update to the next, and are opened again after an abort.

    A new group first broadcasts a bucket that changes nothing, so that NCCL connects before the first real bucket. The
    configured time limit bounds each request to an engine: joining a group, and receiving and loading a bucket.
    """

    spread = True

    def __init__(self, transfer: Transfer) -> None:
        require_routable([engine.url for engine in transfer.engines.members])
        super().__init__(transfer)
        self.copies = transfer.engines.ranks
        self._group: BroadcastGroup | None = None
        self._meeting_points: list[_MeetingPoint | None] = []
        """On rank 0: the meeting point of each rank's group, by rank; None for a rank that sends nothing."""
        self._aborted_groups: list[str] = []
        """On rank 0: names of aborted groups. An engine keeps such a group's connections until the engine leaves."""
        self._packer = Packer(transfer.engines.first.pieces)
        self._broadcast: Future[None] | None = None
        """The last broadcast of this rank, until it has been waited for."""
        self._requests: Future[None] | None = None
        """On rank 0: the requests to the engines for the buckets of all senders."""
        self._announcements: dict[str, Announcements] = {}

    def fewest_bytes(self, whole_bytes: int) -> int:
        """Return the bytes that the engines' ranks keep."""
        return sum(engine.kept_bytes for engine in self._transfer.engines.members)

    def meeting_point(self) -> Any:
        """Return the _MeetingPoint of this rank's group, as a list; None on a rank that sends nothing."""
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
        """Open the update in the engines, and connect them with new groups. Then rank 0 starts the engines' requests
        for all buckets, in the background.
        """
        new_groups: list[str] = []
        if self._transfer.is_rank_0:
            self._leave_aborted_groups()
            former_points = self._meeting_points
            self._meeting_points = []
            for values in meeting_points:
                point = None if values is None else _MeetingPoint(*values)
                self._meeting_points.append(point)
            for point in self._points_of_senders():
                if point not in former_points:
                    self._open_group(point)
                    new_groups.append(point.name)
            self._transfer.engines.each(lambda e: e.begin())
        if self._group is not None:
            self._group.wait(self._group.joined)
            # Only a new group starts a broadcast here. Another group returns the future of its first broadcast.
            connection = self._group.connect(self._transfer.engines.first.probe_header().bytes)
        for name in new_groups:
            self._receive_probe(name)
        if self._group is not None:
            self._group.wait(connection)
        if self._transfer.is_rank_0:
            self._requests = in_background(self._receive_all)

    def send(self, bucket: Bucket) -> int:
        """Wait for the broadcast of this rank's previous bucket, then start the broadcast of ``bucket``."""
        assert self._group is not None
        data = self._packer.pack(bucket)
        if self._transfer.sent_weights is not None:
            changes = self._transfer.changes(bucket, data)
            self._group.announce(_WHOLE if changes is None else changes.count)
            if changes is not None:
                data = torch.cat(changes.pieces())
        self._wait_for_broadcast()
        self._broadcast = self._group.broadcast(data)
        return data.numel()

    def arrive(self) -> None:
        self._wait_for_broadcast()
        if self._requests is not None:
            self._requests.result()
            self._requests = None

    def end(self) -> None:
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Abort this rank's group, to free the engines that wait in the group. Rank 0 also cancels all other groups."""
        if self._transfer.is_rank_0:
            self._call_off()
        requests = self._requests
        self._broadcast = None
        self._requests = None
        self._aborted_groups += self._group_names()
        self._meeting_points = []
        if self._group is not None:
            self._group.abort()
            self._group = None
        if requests is not None:
            # A request that is still on its way would load its bucket into the session that a caller opens next.
            wait([requests], GRACE_S)
        self._announcements.clear()

    def close(self) -> None:
        """Have the engines leave the groups. Never raises: an engine that has ended has also left."""
        self._leave(self._group_names())
        self._leave_aborted_groups()
        self._meeting_points = []
        self.abort()

    def _points_of_senders(self) -> list[_MeetingPoint]:
        return [point for point in self._meeting_points if point is not None]

    def _group_names(self) -> list[str]:
        return [point.name for point in self._points_of_senders()]

    def _leave_aborted_groups(self) -> None:
        self._leave(self._aborted_groups)
        self._aborted_groups = []

    def _leave(self, names: Sequence[str]) -> None:
        """Have the engines leave groups. Never raises."""
        for name in names:
            try:
                self._transfer.engines.each(partial(EngineWeights.close_group, name=name))
            except ENGINE_FAULTS as error:
                log.info("an engine did not leave the weight group: %s", error)

    def _open_group(self, point: _MeetingPoint) -> None:
        """Have every engine join the group."""
        engines = self._transfer.engines
        ranks = engines.first_ranks()
        # The group has all engines' ranks and the sender.
        size = engines.ranks + 1
        calls = engines.start(lambda e: e.open_group(*point, first_rank=ranks[e.url], size=size))
        self._all_arrive(calls, f"opening the broadcast group {point.name}")

    def _receive_probe(self, name: str) -> None:
        """Have every engine receive the bucket that changes nothing."""
        engines = self._transfer.engines
        header = engines.first.probe_header()
        calls = engines.start(lambda e: e.receive(header, name))
        self._all_arrive(calls, f"connecting the broadcast group {name}")

    def _receive_all(self) -> None:
        """Have every engine receive the buckets of all senders, in the plan's order."""
        for planned in self._transfer.plan:
            self._receive(planned)

    def _receive(self, planned: PlannedBucket) -> None:
        """Have every engine enter the broadcast of a bucket by its sender, and load the bucket."""
        engines = self._transfer.engines
        name = self._point_of(planned.receiver).name
        header = engines.first.planned_header(planned)
        if self._transfer.sent_weights is not None:
            count = self._announced_count(planned.receiver)
            if count != _WHOLE:
                header = changes_header(header, count)
        calls = engines.start(lambda e: e.receive(header, name))
        sender = f"trainer rank {planned.receiver}"
        self._all_arrive(calls, f"a broadcast of {header.bytes} bytes from {sender}")

    def _point_of(self, sender: int) -> _MeetingPoint:
        """Return the meeting point of a rank that sends."""
        point = self._meeting_points[sender]
        assert point is not None
        return point

    def _announced_count(self, sender: int) -> int:
        """Return how many changes the sender's next bucket has; _WHOLE if the bucket is sent whole."""
        point = self._point_of(sender)
        try:
            if point.name not in self._announcements:
                limit = self._transfer.timeout_s
                self._announcements[point.name] = Announcements(point.address, point.port, limit)
            return self._announcements[point.name].next()
        except ENGINE_FAULTS:
            # Free the other senders: they wait in broadcasts that rank 0 will not tell the engines to enter.
            self._call_off()
            raise

    def _all_arrive(self, calls: dict[str, Future[None]], step: str) -> None:
        """Wait until every engine has answered its call. A failure frees the ranks and engines that wait in groups."""
        self._transfer.engines.arrive(calls, self._transfer.timeout_s, step, self._call_off)

    def _call_off(self) -> None:
        """Make the ranks of every group stop waiting."""
        for point in self._points_of_senders():
            call_off(point.address, point.port)

    def _wait_for_broadcast(self) -> None:
        """Wait for this rank's last broadcast. A failure aborts the group, so that no engine waits in it."""
        if self._broadcast is None:
            return
        assert self._group is not None
        broadcast = self._broadcast
        self._broadcast = None
        try:
            self._group.wait(broadcast)
        except BaseException:
            self._group.abort()
            if self._requests is not None:
                # Rank 0 made the HTTP calls, so its exception names the failing engine.
                self._requests.result()
            raise


MEMORY = "/dev/shm"
"""Folder in the memory of this host, for engines on the same host."""


class TensorStrategy(Strategy):
    """Shares memory with engines on the sender's own host; nothing is transferred.

    On a CPU the bucket is copied into shared memory; on a GPU the engine opens it by CUDA IPC (not yet run on a GPU).
    Raises EngineMismatchError for an engine on another host.
    """

    # Every rank sends the buckets that it holds most of, in any order: an engine handles one request at a time, and
    # engines do not wait for each other.
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
        # The engines may still read the buffers of ``_packer``. So buckets are packed elsewhere to find their changes.
        self._comparison_packer = Packer(transfer.engines.first.pieces)
        self._requests: dict[str, Future[None]] = {}

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self._transfer.is_rank_0:
            self._transfer.engines.each(lambda e: e.begin())

    def send(self, bucket: Bucket) -> int:
        """Copy the bucket into memory that engines can open. Make the engines load it after the previous bucket."""
        engines = self._transfer.engines
        header = engines.first.header([(name, tensor.shape) for name, tensor in bucket])
        changes = None
        if self._transfer.sent_weights is not None:
            changes = self._transfer.changes(bucket, self._comparison_packer.pack(bucket))
        if changes is None:
            data = self._packer.copy(bucket, shared_empty)
        else:
            header = changes_header(header, changes.count)
            data = shared_empty(header.bytes, changes.values.device)
            torch.cat(changes.pieces(), out=data)
        self.arrive()
        self._requests = engines.start(lambda e: e.receive_shared(header, data))
        return data.numel()

    def arrive(self) -> None:
        requests = self._requests
        self._requests = {}
        if requests:
            timeout = self._transfer.timeout_s
            self._transfer.engines.arrive(requests, timeout, "loading shared tensors")

    def end(self) -> None:
        self._transfer.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Use new buffers from here on: an engine may still be reading the old buffers."""
        # As in ``DistributedStrategy.abort``. The requests of other ranks are not waited for.
        wait(self._requests.values(), GRACE_S)
        self._requests = {}
        self._packer = Packer(self._transfer.engines.first.pieces)


class DiskStrategy(Strategy):
    """Rank 0 writes a Hugging Face folder on shared storage, and the engines read the folder.

    This strategy is the slowest, but a shared file system also reaches engines that no broadcast group reaches. The
    folder is removed when the engines have read it. By default it is in this host's memory. So EngineMismatchError is
    raised if no folder is configured and an engine is on another host.
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
    remote_urls = [e.url for e in transfer.engines.members if not on_this_host(e.url)]
    if remote_urls and transfer.directory is None:
        raise EngineMismatchError(
            f"weight_sync.strategy disk: the engine at {remote_urls[0]} runs on another host; expected "
            "weight_sync.directory, a folder that trainer and engines see under the same path"
        )


def new_folder(transfer: Transfer, purpose: str) -> Path:
    """Create a folder in the configured folder. If no folder is configured, create it in shared memory."""
    base = Path(transfer.directory or MEMORY)
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{private_name()}{purpose}-", dir=base))


STRATEGIES: dict[str, type[Strategy]] = {
    "distributed": DistributedStrategy,
    "tensor": TensorStrategy,
    "disk": DiskStrategy,
}
