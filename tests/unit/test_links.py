"""Connections to the rendezvous of a weight group, and transfers on a GPU's streams, as far as CPUs can show their
order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.system.network import listening_store
from megatron_dppo.system.ports import free_port
from megatron_dppo.weights import links
from megatron_dppo.weights.links import ConnectionBrokenError, Link, connect_store
from tests.patience import own_patience


def test_a_rendezvous_that_is_gone_fails_at_once() -> None:
    """Within its limit torch would try again where nothing listens."""
    port = free_port("127.0.0.1")
    patience = own_patience(10)
    with pytest.raises(ConnectionBrokenError, match=f"127.0.0.1:{port}"):
        connect_store("127.0.0.1", port, 60)
    assert not patience.is_exhausted()


@pytest.mark.parametrize(("limit_s", "is_reached"), [(60, True), (-1, False)])
def test_a_busy_rendezvous_has_the_whole_limit(
    monkeypatch: pytest.MonkeyPatch, limit_s: int, is_reached: bool
) -> None:
    """The first attempt fails."""
    limit = timedelta(seconds=60)
    store = listening_store("127.0.0.1", 0, 2, limit, wait_for_workers=False)
    store.set("key", "value")
    connect, failures = links.rendezvous_client, [RuntimeError("no answer")]

    def fail_once(address: str, port: int) -> dist.TCPStore:
        if failures:
            raise failures.pop()
        return connect(address, port)

    monkeypatch.setattr(links, "rendezvous_client", fail_once)
    if is_reached:
        client: Any = connect_store("127.0.0.1", store.port, limit_s)
        assert (client.get("key"), client.timeout) == (b"value", limit)
    else:
        with pytest.raises(ConnectionBrokenError, match="no answer"):
            connect_store("127.0.0.1", store.port, limit_s)


class RecordingStream:
    """Replaces a CUDA stream, so that no GPU is needed. It records its calls in order."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen
        self.device = "cuda:0"

    def record_event(self) -> str:
        self.seen.append(f"event on {self.name}")
        return f"event on {self.name}"

    def wait_event(self, event: str) -> None:
        self.seen.append(f"{self.name} waits for {event}")

    def synchronize(self) -> None:
        self.seen.append(f"host waits for {self.name}")


def test_on_a_gpu_a_message_is_sent_on_a_stream_that_waits_for_its_bytes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    current = [RecordingStream("default", seen)]

    @contextmanager
    def use_stream(stream: RecordingStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Group:
        def _start_coalescing(self, device: Any) -> None:
            seen.append("begin")

        def send(self, tensors: Any, peer: int, tag: int) -> None:
            seen.append(f"send to {peer} on {current[-1].name}")

        def recv(self, tensors: Any, peer: int, tag: int) -> None:
            seen.append(f"receive from {peer} on {current[-1].name}")

        def _end_coalescing(self, device: Any) -> Any:
            return SimpleNamespace(
                wait=lambda limit: seen.append(f"{current[-1].name} waits for both")
            )

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordingStream("stream", seen))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    group: Any = Group()
    link = Link(group, dist.HashStore(), timedelta(seconds=1), torch.device("cuda:0"))
    data = torch.zeros(1)
    for _ in range(2):
        link.start([(data, 3)], [(data, 2)]).result(10)
    steps = [
        "event on default",  # recorded before the thread begins, so that no later work there is waited for
        "stream waits for event on default",
        "begin",
        "receive from 2 on stream",
        "send to 3 on stream",
        "stream waits for both",
        "host waits for stream",
    ]
    assert seen == 2 * steps
