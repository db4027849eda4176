"""Strategy ``distributed``: each bucket is one gloo or NCCL broadcast to all engines' ranks.

Every rank that holds weights sends its own: it gathers a bucket from the ranks that share its tensors,
and broadcasts it in a group of its own with all engines. Rank 0 conducts. It knows every bucket from
the plan, so it tells the engines, in the plan's order, which broadcast to enter next; they load one
bucket while its sender, and the others, gather and hash the next. All engines thus enter the same
broadcasts in the same order, which no two senders could ensure.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from megatron_dppo.system.background import in_background
from megatron_dppo.weight_sync.engines import Receiver
from megatron_dppo.weight_sync.interfaces import Bucket, PlannedBucket
from megatron_dppo.weight_sync.strategies.broadcast import BroadcastGroup, call_off, local_address
from megatron_dppo.weight_sync.strategies.packing import Packer
from megatron_dppo.weight_sync.strategies.route import Route

log = logging.getLogger(__name__)


class DistributedStrategy:
    """See ``base.Strategy``. Groups live from one update to the next, and are made anew after an abort.

    The configured time limit bounds each request to an engine: entering a group, and a bucket from
    when the engines are told of it until they have loaded it.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self.copies = route.engines.ranks
        self._group: BroadcastGroup | None = None
        self._known: list[Any] = []
        self._packer = Packer(route.engines.first.pack)
        self._in_flight: Future[None] | None = None
        self._conducting: Future[None] | None = None

    def hello(self) -> Any:
        """Where this rank's group meets; None from a rank that sends nothing."""
        if not self._route.sends:
            return None
        if self._group is None:
            engines = self._route.engines
            self._group = BroadcastGroup(
                ranks=engines.ranks,
                address=local_address(engines.first.url),
                device=engines.first.device,
                timeout_s=self._route.timeout_s,
            )
        group = self._group
        return [group.address, group.port, group.name, group.backend]

    def begin(self, hellos: Sequence[Any]) -> None:
        """Have the engines join every sender's group, and open the update session."""
        if self._route.conducts:
            known, self._known = self._known, list(hellos)
            for hello in hellos:
                if hello is not None and hello not in known:
                    self._invite(*hello)
            self._route.engines.each(lambda e: e.begin())
        if self._group is not None:
            self._group.wait(self._group.joined)
        if self._route.conducts:
            self._conducting = in_background(self._conduct)

    def send(self, bucket: Bucket) -> int:
        """Wait for this rank's bucket before, then start the broadcast of this one."""
        assert self._group is not None
        data = self._packer.pack(bucket)
        self._sent()
        self._in_flight = self._group.broadcast(data)
        return data.numel()

    def arrive(self) -> None:
        """Wait for this rank's last bucket; on rank 0, for all."""
        self._sent()
        if self._conducting is not None:
            self._conducting.result()
            self._conducting = None

    def end(self) -> None:
        """Close the update session."""
        self._route.engines.each(lambda e: e.end())

    def abort(self) -> None:
        """Break this rank's group, which frees an engine that waits in it; rank 0 tells the others."""
        if self._route.conducts:
            self._call_off()
        self._in_flight = self._conducting = None
        self._known = []
        if self._group is not None:
            self._group.abort()
            self._group = None

    def close(self) -> None:
        """Have the engines leave the groups; one that is gone has left already. Never raises."""
        for _, _, name, _ in filter(None, self._known):
            try:
                self._route.engines.each(partial(_leave, name))
            except (OSError, RuntimeError) as error:
                log.info("an engine did not leave the weight group: %s", error)
        self._known = []
        self.abort()

    def _invite(self, address: str, port: int, name: str, backend: str) -> None:
        engines = self._route.engines
        first_ranks, size = engines.first_ranks(), engines.ranks + 1
        calls = engines.start(partial(_enter, (address, port, name, backend), first_ranks, size))
        self._all_arrive(calls, f"opening the broadcast group {name}")

    def _conduct(self) -> None:
        """Tell the engines of every bucket in turn."""
        for planned in self._route.plan:
            self._announce(planned)

    def _announce(self, planned: PlannedBucket) -> None:
        engines, name = self._route.engines, self._known[planned.receiver][2]
        header = engines.first.header([(t.name, t.shape) for t in planned.tensors])
        calls = engines.start(lambda e: e.receive(header, name))
        what = f"a broadcast of {header.bytes} bytes from trainer rank {planned.receiver}"
        self._all_arrive(calls, what)

    def _all_arrive(self, calls: dict[str, Future[None]], what: str) -> None:
        self._route.engines.arrive(calls, self._route.timeout_s, what, self._call_off)

    def _call_off(self) -> None:
        for address, port, *_ in filter(None, self._known):
            call_off(address, port)

    def _sent(self) -> None:
        """Wait for the bucket in flight. A failure breaks the group, so that no engine waits in it."""
        if self._in_flight is None:
            return
        assert self._group is not None
        sent, self._in_flight = self._in_flight, None
        try:
            self._group.wait(sent)
        except (OSError, RuntimeError):
            self._group.abort()
            if self._conducting is not None:
                self._conducting.result()  # who gives the orders knows the engine at fault
            raise


def _enter(
    meeting: tuple[str, int, str, str],
    first_ranks: Mapping[str, int],
    size: int,
    engine: Receiver[Any],
) -> None:
    engine.open_group(*meeting, first_rank=first_ranks[engine.url], size=size)


def _leave(name: str, engine: Receiver[Any]) -> None:
    engine.close_group(name)
