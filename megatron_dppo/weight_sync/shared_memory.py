"""Strategy ``tensor``: a trainer rank packs messages in memory that engines on the same host open.

Every rank calls the servers that its batches are for. One request brings a batch to a server: each engine rank opens
its own messages of the batch. A server handles one request at a time, and servers do not wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.shards import SHARED_INSTRUCTION, SharedInstruction
from megatron_dppo.engine.shared_bytes import SharedBytes, shared_empty
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.weight_sync.engines import GRACE_S, on_this_host
from megatron_dppo.weight_sync.shards import Sent, ShardStrategy
from megatron_dppo.weight_sync.source import WeightSource


class TensorStrategy(ShardStrategy):
    """Sends messages in shared memory to engines on the sender's own host; nothing is transferred.

    On a CPU the memory is a file under ``/dev/shm``; on a GPU the engine opens it by CUDA IPC (not yet run on a GPU).
    """

    allocate = staticmethod(shared_empty)

    def __init__(self, source: WeightSource, config: WeightSyncConfig) -> None:
        super().__init__(source, config)
        self.calls_engines = True
        self._requests: dict[str, Future[None]] = {}

    @staticmethod
    def reach_fault(url: str, config: WeightSyncConfig) -> str | None:
        if on_this_host(url):
            return None
        return (
            f"weight_sync.strategy tensor: the engine at {url} runs on another host than the trainer, and memory is "
            "shared within one host only; expected strategy distributed, or disk with weight_sync.directory"
        )

    @property
    def batch_bytes(self) -> int | None:
        return self.bucket_bytes

    def begin(self, meeting_points: Sequence[Any]) -> None:
        if self.rank == 0:
            self.attached.each(lambda engine: engine.begin())

    def send(self, batch: Sequence[Sent]) -> None:
        """Make the engines load a batch once they have loaded this rank's batch before."""
        first_ranks = self.attached.first_ranks(0)
        messages: defaultdict[int, list[SharedBytes]] = defaultdict(list)
        for message, data, changed in batch:
            for rank in message.column:
                instruction = SharedInstruction(
                    self.shards.facts,
                    self.shards.plan.fingerprint,
                    rank,
                    message.sender,
                    message.step,
                    changed,
                )
                text = SHARED_INSTRUCTION.dump_json(instruction).decode()
                messages[rank].append(SharedBytes(text, data))

        async def load(engine: EngineWeights) -> None:
            first_rank = first_ranks[engine.url]
            own_messages = [messages[first_rank + rank] for rank in range(engine.ranks)]
            if any(own_messages):
                await engine.receive_shared(own_messages)

        self.wait_for_all()
        self._requests = self.attached.start(load)

    def wait_for_all(self) -> None:
        if self._requests:
            self.attached.arrive(self._requests, self.config.timeout_s, "loading shared tensors")
            self._requests = {}

    def abort(self) -> None:
        """Wait a few seconds at most for this rank's requests, also for one that exceeded the time limit."""
        # A request that is still on its way would load its batch into the session that a caller opens next.
        _, pending = wait(self._requests.values(), GRACE_S)
        self._requests = {}
        if pending and self.planned is not None:
            # An engine may still be reading the buffers. Otherwise keep them: if an engine has not opened a handle,
            # their memory would never be freed.
            self.planned.forget_buffers()
