"""Strategy ``tensor``: a trainer rank packs messages in memory that engines on the same host open.

Every rank calls the servers on its host. One request brings messages to a server: each engine rank opens its own. A
server handles one request at a time, and servers do not wait for each other. Messages for other hosts travel between
trainer ranks (``relays.py``), in a group of gloo or NCCL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.weights.engine_weights import EngineWeights
from megatron_dppo.weights.engines import GRACE_S, meeting_address, on_this_host
from megatron_dppo.weights.links import Link
from megatron_dppo.weights.relays import Relays, Round
from megatron_dppo.weights.server.shards import SHARED_INSTRUCTION, WHOLE, SharedInstruction
from megatron_dppo.weights.shards import Sent, ShardStrategy, TwoBuffers, bytes_of, divided
from megatron_dppo.weights.shared_bytes import SharedBytes, shared_empty
from megatron_dppo.weights.source import WeightSource
from megatron_dppo.weights.weight_group import WeightGroup, call_off


class TensorStrategy(ShardStrategy):
    """Sends messages in shared memory to the engines on the sender's host, and by relays to those on other hosts.

    On a CPU the memory is a file under ``/dev/shm``; on a GPU the engine opens it by CUDA IPC (not yet run on a GPU).
    """

    allocate = staticmethod(shared_empty)

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self.calls_engines = True
        self._requests: dict[str, Future[None]] = {}
        self._trainer_ranks = 1
        self._relays: Relays | None = None
        self._rounds: list[Round] = []
        self._round = 0
        """The number of the next round."""
        self._received = TwoBuffers(0)
        self._group: WeightGroup | None = None
        self._link: Link | None = None

    @staticmethod
    def reach_fault(url: str, config: WeightSyncConfig, *, shares_devices: bool) -> str | None:
        if shares_devices or on_this_host(url):
            return None
        return (
            f"weight_sync.strategy tensor: the engine at {url} runs on another host than the trainer, and memory is "
            "shared within one host only; expected strategy distributed, or disk with weight_sync.directory"
        )

    def plan(self, source: WeightSource) -> None:
        super().plan(source)
        numbers = self.servers.host_numbers()
        own_hosts: set[int] = set()
        for url, number in zip(self.servers.urls, numbers, strict=True):
            if on_this_host(url):
                own_hosts.add(number)
        hosts = source.all_gather(sorted(own_hosts))
        self._trainer_ranks = len(hosts)
        relays = Relays(self.shards.plan, hosts)
        for number in relays.unreached_hosts:
            url = self.servers.urls[numbers.index(number)]
            raise EngineMismatchError(
                f"weight_sync.strategy tensor: no trainer rank runs on the host of the engine at {url}, and memory is "
                "shared within one host only; expected strategy distributed, or disk with weight_sync.directory"
            )
        self._relays = relays if relays.are_needed else None
        self._rounds = []
        if self._relays is None:
            return
        if self.sent_weights is not None:
            raise EngineMismatchError(
                "weight_sync.changes_only: got true with weight_sync.strategy tensor and engines on several hosts, "
                "expected strategy distributed"
            )
        relayed_bytes = self.bucket_bytes - self.batch_bytes
        self._rounds = relays.rounds(self.rank, self.batch_bytes, relayed_bytes)
        self.shards.use_batches([current.batch for current in self._rounds])
        relayed = [[message for message, _ in current.receives] for current in self._rounds]
        self._received = TwoBuffers(max(map(bytes_of, relayed)))

    @property
    def batch_bytes(self) -> int:
        # A rank receives about as much from each of the other hosts as it packs.
        return self.bucket_bytes // len(set(self.servers.host_numbers()))

    def hops_between_nodes(self, hosts: Sequence[str | None]) -> int:
        return len({host for host in hosts if host is not None})

    def meeting_point(self) -> Any:
        """Return, on rank 0, the address, port and name of the group of relays; None without relays."""
        if self.rank != 0 or self._relays is None:
            return None
        if self._group is None:
            self._group = self._new_group(meeting_address(self.servers.urls))
        return [self._group.address, self._group.port, self._group.name]

    def _new_group(self, address: str, port: int = 0, name: str = "") -> WeightGroup:
        return WeightGroup(
            ranks=0,
            address=address,
            device=self.servers.device,
            timeout_s=self.config.timeout_s,
            members=self._trainer_ranks,
            rank=self.rank,
            port=port,
            name=name,
        )

    def begin(self, meeting_points: Sequence[Any]) -> None:
        """Join the group of relays, if there is one. Rank 0 also opens the update in the engines."""
        self._round = 0
        if meeting_points[0] is not None:
            address, port, name = meeting_points[0]
            try:
                self._join(address, port, name)
            except BaseException:
                # The other ranks wait for this one.
                call_off(address, port)
                raise
        if self.rank == 0:
            self.attached.each(lambda engine: engine.begin())

    def _join(self, address: str, port: int, name: str) -> None:
        if self._group is None or self._group.name != name:
            self._group = self._new_group(address, port, name)
            self._link = None
        if self._link is None:
            self._group.wait(self._group.joined)
            self._link = self._group.link(torch.device(self.servers.device))

    def send(self, batch: Sequence[Sent]) -> None:
        """Make the engines load a batch, and the messages that this rank relays, once they have loaded those before."""
        messages = [*batch, *self._relayed(batch)]
        by_rank: defaultdict[int, list[SharedBytes]] = defaultdict(list)
        for message, data, changed in messages:
            for rank in message.column:
                if self._relays is not None and not self._relays.is_local(self.rank, rank):
                    continue
                instruction = SharedInstruction(
                    self.shards.facts,
                    self.shards.plan.fingerprint,
                    rank,
                    message.sender,
                    message.step,
                    changed,
                )
                text = SHARED_INSTRUCTION.dump_json(instruction).decode()
                by_rank[rank].append(SharedBytes(text, data))
        first_ranks = self.attached.first_ranks(0)

        async def load(engine: EngineWeights) -> None:
            first_rank = first_ranks[engine.url]
            own_messages = [by_rank[first_rank + rank] for rank in range(engine.ranks)]
            if any(own_messages):
                await engine.receive_shared(own_messages)

        self.wait_for_all()
        self._requests = self.attached.start(load)

    def _relayed(self, batch: Sequence[Sent]) -> list[Sent]:
        """Exchange a round's messages with other hosts. Returns those that this rank relays."""
        if self._relays is None:
            return []
        assert self._link is not None
        current = self._rounds[self._round]
        self._round += 1
        data_of = {sent.message.key: sent.data for sent in batch}
        sends = [(data_of[message.key], relay) for message, relay in current.sends]
        received: list[Sent] = []
        receives = []
        if current.receives:
            incoming = [message for message, _ in current.receives]
            buffer = self._received.next(self.allocate, torch.device(self.servers.device))
            for (message, sender), data in zip(
                current.receives, divided(buffer, incoming), strict=True
            ):
                receives.append((data, sender))
                received.append(Sent(message, data, WHOLE))
        if sends or receives:
            self._link.wait(self._link.start(sends, receives))
        return received

    def wait_for_all(self) -> None:
        if self._requests:
            self.attached.arrive(self._requests, self.config.timeout_s, "loading shared tensors")
            self._requests = {}

    def arrive(self) -> None:
        super().arrive()
        self._received.release_memory()

    def abort(self) -> None:
        """Leave the group of relays, and wait a few seconds at most for this rank's requests."""
        self._link = None
        if self._group is not None:
            call_off(self._group.address, self._group.port)
            self._group.abort()
            self._group = None
        # A request that is still on its way would load its messages into the session that a caller opens next.
        _, pending = wait(self._requests.values(), GRACE_S)
        self._requests = {}
        if pending and self.planned is not None:
            # An engine may still be reading the buffers. Otherwise keep them: if an engine has not opened a handle,
            # their memory would never be freed.
            self.planned.forget_buffers()
            self._received.forget()
