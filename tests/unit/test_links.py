"""Transfers of a weight group on a GPU's streams, as far as CPUs can show their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.engine.links import Link


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
