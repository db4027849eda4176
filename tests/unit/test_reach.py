"""Whether weights can reach a server on another host: once a process joins the group as SGLang's ranks do, and once
no process joins."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.weights import reach, shared_memory, strategies
from megatron_dppo.weights.engine_weights import WireHeader
from megatron_dppo.weights.reach import check_reach

JOIN = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, rendezvous
address, port, name, backend, rank, size = sys.argv[1:]
limit = timedelta(seconds=60)
store, rank, size = next(rendezvous(f"tcp://{address}:{port}", int(rank), int(size), timeout=limit))
_new_process_group_helper(
    size, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit
)
print("joined", flush=True)
group = dist.distributed_c10d._world.pg_names
(group,) = [g for g, n in group.items() if n == name]
options = dist.BroadcastOptions()
options.rootRank = options.rootTensor = 0
got = torch.ones(4, dtype=torch.uint8)
group.broadcast([got], options).wait(limit)
# Flush: a process that ends while its group's threads run may be aborted before it writes its output.
print("received", got.tolist(), flush=True)
"""


class Ranks:
    """Replaces ``EngineWeights``: one engine rank, which joins in a process of its own, or never joins."""

    url, ranks, device = "http://127.0.0.1:1", 1, "cpu"

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self.calls: list[str] = []

    async def open_group(
        self, address: str, port: int, name: str, backend: str, *, first_rank: int, size: int
    ) -> None:
        self.calls.append("open")
        if not self._joins:
            await asyncio.sleep(600)
        words = [address, port, name, backend, first_rank, size]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", JOIN, *map(str, words), stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert await self.process.stdout.readline() == b"joined\n"

    def probe_header(self) -> WireHeader:
        return WireHeader(("nothing",), ("float32",), ((1,),), 4)

    async def begin(self) -> None:
        self.calls.append("begin")

    async def receive(self, header: WireHeader, group: str) -> None:
        self.calls.append("receive")
        output, _ = await self.process.communicate()
        assert output == b"received [0, 0, 0, 0]\n"

    async def end(self) -> None:
        self.calls.append("end")

    async def close_group(self, name: str) -> None:
        self.calls.append("close")


def test_a_server_that_joins_is_reachable_and_leaves_again(monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 60.0)
    ranks: Any = Ranks(joins=True)
    asyncio.run(check_reach(ranks, WeightSyncConfig()))
    assert ranks.calls == ["open", "begin", "receive", "end", "close"]


def test_a_server_that_does_not_come_is_refused_in_time(monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.3)
    ranks: Any = Ranks(joins=False)
    with pytest.raises(
        EngineMismatchError, match=r"can't connect back to the trainer at 127\.0\.0\.1:"
    ):
        asyncio.run(check_reach(ranks, WeightSyncConfig()))


@pytest.mark.parametrize(
    ("sync", "here", "reachable"),
    [
        ({"strategy": "tensor"}, True, True),
        ({"strategy": "tensor"}, False, False),
        ({"strategy": "disk"}, False, False),
        ({"strategy": "disk", "directory": "/shared"}, False, True),
    ],
)
def test_strategies_of_one_host_refuse_another(monkeypatch, sync, here, reachable):
    for module in (strategies, shared_memory):
        monkeypatch.setattr(module, "on_this_host", lambda url: here)
    ranks: Any = Ranks(joins=False)
    if reachable:
        asyncio.run(check_reach(ranks, WeightSyncConfig(**sync)))
    else:
        with pytest.raises(EngineMismatchError, match="runs on another host than the trainer"):
            asyncio.run(check_reach(ranks, WeightSyncConfig(**sync)))
