"""The table of strategies, by their name in the configuration (``weight_sync.strategy``).

Strategy ``distributed``: each bucket is one gloo or NCCL broadcast to all engines' ranks.

Every rank that holds weights sends its own: it gathers a bucket from the ranks that share its tensors,
and broadcasts it in a group of its own with all engines. Rank 0 conducts. It knows every bucket from
the plan, so it tells the engines by HTTP, in the plan's order, which broadcast to enter next; they load
one bucket while its sender, and the others, gather and hash the next. All engines thus enter the same
broadcasts in the same order, which no two senders could ensure.

A dead engine breaks its connections at once; a hung one runs into the time limit of the request.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_dppo.checkpoint_conversion.hf_folder import ShardedWriter
from megatron_dppo.checkpoint_conversion.tensor_store import TensorSpec
from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.broadcast_group import CALLED_OFF, errors_abort_the_group, new_name
from megatron_dppo.engine.errors import EngineError, EngineMismatchError
from megatron_dppo.engine.weights import EngineWeights, shared_empty
from megatron_dppo.system.network import is_loopback, listening_store
from megatron_dppo.system.scratch import private_name
from megatron_dppo.weight_sync.engines import (
    ENGINE_FAULTS,
    Bucket,
    Packer,
    PlannedBucket,
    Strategy,
    Transfer,
    local_address,
    meeting_address,
    on_this_host,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of torch.distributed for each device of the engine."""
_LISTEN_S = 0.2
_CALL_S = 5.0
_SLACK = timedelta(seconds=30)


class DistributedStrategy(Strategy):
    """See ``engines.Strategy``. Groups live from one update to the next, and are made anew after an abort.
    A new group connects at once, by a bucket that changes nothing: NCCL would else do so in the first real one.

    The configured time limit bounds each request to an engine: entering a group, and a bucket from
    when the engines are told of it until they have loaded it.
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
        new: list[str] = []
        if self._transfer.is_rank_0:
            former, self._points = self._points, list(meeting_points)
            for point in meeting_points:
                if point is not None and point not in former:
                    self._invite(*point)
                    new.append(point[2])
            self._transfer.engines.each(lambda e: e.begin())
        if self._group is not None:
            self._group.wait(self._group.joined)
            connected = self._group.connect(self._transfer.engines.first.probe_header().bytes)
        for name in new:
            self._probe(name)
        if self._group is not None:
            self._group.wait(connected)
        if self._transfer.is_rank_0:
            self._conducting = in_background(self._conduct)

    def send(self, bucket: Bucket) -> int:
        """Wait for this rank's bucket before, then start the broadcast of this one."""
        assert self._group is not None
        data = self._packer.pack(bucket)
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
        """Break this rank's group, which frees the engines that wait in it; rank 0 tells the others."""
        if self._transfer.is_rank_0:
            self._call_off()
        self._in_flight = self._conducting = None
        self._points = []
        if self._group is not None:
            self._group.abort()
            self._group = None

    def close(self) -> None:
        """Have the engines leave the groups; one that is gone has left already. Never raises."""
        for _, _, name, _ in filter(None, self._points):
            try:
                self._transfer.engines.each(partial(EngineWeights.close_group, name=name))
            except ENGINE_FAULTS as error:
                log.info("an engine did not leave the weight group: %s", error)
        self._points = []
        self.abort()

    def _invite(self, address: str, port: int, name: str, backend: str) -> None:
        engines = self._transfer.engines
        ranks, size = engines.first_ranks(), engines.ranks + 1
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
        engines, name = self._transfer.engines, self._points[planned.receiver][2]
        header = engines.first.header([(t.name, t.shape) for t in planned.tensors])
        calls = engines.start(lambda e: e.receive(header, name))
        sender = f"trainer rank {planned.receiver}"
        self._all_arrive(calls, f"a broadcast of {header.bytes} bytes from {sender}")

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
        sent, self._in_flight = self._in_flight, None
        try:
            self._group.wait(sent)
        except BaseException:
            self._group.abort()
            if self._conducting is not None:
                # Rank 0 made the HTTP calls, so its exception names the failing engine.
                self._conducting.result()
            raise


class CalledOffError(EngineError):
    """Rank 0 broke the transfer off; its own error says why."""


class ConnectionBrokenError(EngineError):
    """gloo or NCCL lost a connection to an engine, or could not make one."""


@contextmanager
def _connections() -> Iterator[None]:
    # torch has no type of its own for most of what gloo and NCCL raise.
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBrokenError(str(error)) from error


def call_off(address: str, port: int) -> None:
    """Tell the rank whose rendezvous is at ``address`` to stop waiting. Never raises."""
    limit = timedelta(seconds=_CALL_S)
    try:
        store = dist.TCPStore(address, port, None, False, limit, wait_for_workers=False)
        store.set(CALLED_OFF, "1")
    except (RuntimeError, OSError) as error:
        # The engine has ended, or has left the group itself.
        log.info("weight transfer: %s:%d was not told to stop: %s", address, port, error)


class BroadcastGroup:
    """A process group of this process, as rank 0, and ``ranks`` engine ranks; ``joined`` is done when all are in.

    The others must be told ``address``, ``port``, ``name`` and ``backend``. The rendezvous listens
    on a free port of ``address`` only.
    """

    def __init__(self, *, ranks: int, address: str, device: str, timeout_s: float) -> None:
        # The callers' own limits are shorter, and their errors name the slow operation: this limit is the last resort.
        self._backend_limit = timedelta(seconds=timeout_s) + _SLACK
        self.name = new_name(self._backend_limit)
        self.address = address
        self.backend = BACKENDS[device]
        self._group: dist.ProcessGroup | None = None
        limit = timedelta(seconds=timeout_s)
        self._store = listening_store(address, 0, ranks + 1, limit, wait_for_workers=False)
        self.port = self._store.port
        self._device = device
        self.joined: Future[None] = in_background(partial(self._join, ranks + 1))
        self._connected: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def wait(self, future: Future[None]) -> None:
        """Wait for ``future`` of this group, or until someone calls the whole transfer off.

        Raises CalledOffError, or what the future raises.
        """
        # Time is kept by who gives the engines their orders, which includes waiting for other ranks' buckets; this
        # side only listens.
        while not wait([future], _LISTEN_S).done:
            if self._store.check([CALLED_OFF]):
                raise CalledOffError("another rank called the weight transfer off")
        future.result()

    def _join(self, size: int) -> None:
        limit = self._backend_limit
        options = _gloo_options(self.address, limit) if self.backend == "gloo" else None
        # An engine makes its group with this helper, too: both sides must name their keys alike.
        with _connections(), errors_abort_the_group(self.backend):
            group, _ = c10d._new_process_group_helper(
                size,
                0,
                [],
                c10d.Backend(self.backend),
                dist.PrefixStore(self.name, self._store),
                group_name=GroupName(self.name),
                backend_options=options,
                timeout=limit,
            )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def connect(self, size: int) -> Future[None]:
        """Start the first broadcast, once, of ``size`` bytes: NCCL's ranks connect in it."""
        if self._connected is None:
            probe = torch.zeros(size, dtype=torch.uint8, device=self._device)
            self._connected = self.broadcast(probe)
        return self._connected

    def broadcast(self, data: Tensor) -> Future[None]:
        """Start sending ``data``; the others must enter the same broadcast. Done when it is out."""
        # In a thread of its own: NCCL's first broadcast returns only when all ranks are connected.
        assert self._group is not None
        filled = None
        if data.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(data.device)
            filled = (torch.cuda.current_stream(data.device).record_event(), self._stream)
        return in_background(partial(_broadcast, data, self._group, self._backend_limit, filled))

    def abort(self) -> None:
        """Break the group, on the engines' side too: their ranks watch the rendezvous for the call."""
        if self._group is not None:
            self._store.set(CALLED_OFF, "1")
            # Keep the rendezvous until the engines have read it.
            holder = threading.Timer(_CALL_S, lambda store: None, [self._store])
            holder.daemon = True
            holder.start()
            self._group.abort()
            dist.destroy_process_group(self._group)
            self._group = None


def _broadcast(
    data: Tensor,
    group: dist.ProcessGroup,
    limit: timedelta,
    filled: tuple[torch.cuda.Event, torch.cuda.Stream] | None,
) -> None:
    """Send ``data`` and wait until it may change.

    ``filled``, on a GPU: an event after what filled ``data``, and the stream to send on. Not yet run on a GPU.
    """
    # This frame holds ``group``: gloo can't cancel, and blocks who drops a busy one.
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    if filled is None:
        with _connections():
            group.broadcast([data], options).wait(limit)
        return
    event, stream = filled
    # NCCL begins after all that the current stream has been given, and wait() holds that stream up until the
    # broadcast is over. The thread's own is the device's default one, on which the next bucket is gathered and
    # hashed meanwhile: so a stream of its own, which waits for this bucket's bytes alone (the event was recorded
    # behind them, before this thread began). Nobody writes or frees them before the synchronize returns: the
    # caller waits for this future before it packs the bucket after next, and this frame holds ``data``.
    with _connections(), torch.cuda.stream(stream):
        stream.wait_event(event)
        group.broadcast([data], options).wait(limit)
        # NCCL's wait is for the stream only.
        stream.synchronize()


def _require_routable(urls: Sequence[str]) -> None:
    """Raise EngineMismatchError where servers of several hosts would meet at a loopback address."""
    at_loopback = [url for url in urls if is_loopback(str(urlsplit(url).hostname))]
    if at_loopback and len(at_loopback) < len(urls):
        elsewhere = next(url for url in urls if url not in at_loopback)
        raise EngineMismatchError(
            f"weight_sync.strategy distributed: the engine at {at_loopback[0]} listens on loopback, where the one at "
            f"{elsewhere} can't reach it; expected an address of this machine in engine.host"
        )


def _gloo_options(address: str, limit: timedelta) -> Any:
    """Listen on ``address`` only, whatever the machine's name resolves to."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = limit
    return options


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a thread that doesn't keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# --- whether weights can get to a server that runs elsewhere, found out before an update depends on it

REACH_S = 30.0


async def check_reach(engine: EngineWeights, config: WeightSyncConfig) -> None:
    """Raise EngineMismatchError where the configured strategy can't reach ``engine`` from this process.

    ``distributed``: the server's ranks join a broadcast group here, take a bucket that changes nothing, and leave it;
    so they connect to this host as in an update, with the NCCL that they have. The others need one host, or a folder
    that both see.
    """
    if config.strategy == "distributed":
        await _join_and_leave(engine)
    elif not on_this_host(engine.url) and (config.strategy == "tensor" or not config.directory):
        raise EngineMismatchError(
            f"{engine.url} runs on another host than the trainer: weight_sync.strategy {config.strategy} "
            "can't reach it, expected distributed, or disk with weight_sync.directory"
        )


async def _join_and_leave(engine: EngineWeights) -> None:
    address = local_address(engine.url)
    group = BroadcastGroup(
        ranks=engine.ranks, address=address, device=engine.device, timeout_s=REACH_S
    )
    try:
        async with asyncio.timeout(REACH_S):
            meeting_point = (group.address, group.port, group.name, group.backend)
            await engine.open_group(*meeting_point, first_rank=1, size=engine.ranks + 1)
            await asyncio.wrap_future(group.joined)
            await _connect(engine, group)
            await engine.close_group(group.name)
    except ENGINE_FAULTS as error:
        raise EngineMismatchError(
            f"{engine.url} can't connect back to the trainer at {group.address}:{group.port} for weight updates within "
            f"{REACH_S:.0f} s: {error or type(error).__name__}"
        ) from error
    finally:
        group.abort()


async def _connect(engine: EngineWeights, group: BroadcastGroup) -> None:
    """A broadcast to the engine, as in an update: NCCL's versions meet in the first one."""
    header = engine.probe_header()
    await engine.begin()
    try:
        sent = group.connect(header.bytes)
        await engine.receive(header, group.name)
        await asyncio.wrap_future(sent)
    finally:
        await engine.end()


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
        if self._transfer.is_rank_0:
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
