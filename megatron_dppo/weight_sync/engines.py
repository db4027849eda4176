"""The engines that take an update together: calls to all of them at once, and who is to blame."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_dppo.system.background import TransferTimeoutError, in_background
from megatron_dppo.weight_sync.interfaces import Bucket, EngineFaultError

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long an engine may take to come back out of a broadcast that was broken off."""


class Header(Protocol):
    """How a bucket lies in its flat bytes."""

    @property
    def bytes(self) -> int: ...


class Expected(Protocol):
    """Checksums that engines must have; see ``rollout.engine_checksums.ExpectedChecksums``."""

    def add(self, bucket: Bucket) -> None: ...

    def partial(self) -> Any: ...

    def digests(self, partials: Sequence[Any]) -> Sequence[Mapping[str, str]]: ...


H = TypeVar("H", bound=Header)
T = TypeVar("T")


class Receiver(Protocol[H]):
    """One engine's half, blocking calls; see ``rollout.engine_weights.EngineWeights``."""

    url: str
    device: str

    @property
    def ranks(self) -> int: ...

    @property
    def layout(self) -> Hashable: ...

    def answers(self, timeout_s: float) -> bool: ...

    def pause_when_idle(self, timeout_s: float) -> bool: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def flush(self) -> None: ...

    def set_version(self, label: str) -> None: ...

    def open_group(
        self, address: str, port: int, name: str, backend: str, *, first_rank: int, size: int
    ) -> None: ...

    def close_group(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def inputs(self, name: str) -> Sequence[str]: ...

    def header(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> H: ...

    def pack(self, bucket: Bucket) -> list[Tensor]: ...

    def receive(self, header: H, group: str) -> None: ...

    def receive_shared(self, header: H, data: Tensor) -> None: ...

    def shared_empty(self, size: int, device: torch.device) -> Tensor: ...

    def load_folder(self, folder: str) -> None: ...

    def end(self) -> None: ...

    def checksums(self) -> Sequence[Mapping[str, str]]: ...

    def expected(self) -> Expected: ...

    def score(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]: ...


class Engines(Generic[H]):
    """At least one engine; each call below goes to all of them in parallel threads."""

    def __init__(self, receivers: Sequence[Receiver[H]]) -> None:
        self.receivers = tuple(receivers)

    @property
    def first(self) -> Receiver[H]:
        """The one that knows the format for all: they serve the same model."""
        return self.receivers[0]

    @property
    def ranks(self) -> int:
        """Ranks of all engines together."""
        return sum(engine.ranks for engine in self.receivers)

    def first_ranks(self) -> dict[str, int]:
        """By URL, an engine's first rank in a broadcast group whose rank 0 is a trainer's."""
        ranks, at = {}, 1
        for engine in self.receivers:
            ranks[engine.url] = at
            at += engine.ranks
        return ranks

    def start(self, call: Callable[[Receiver[H]], T]) -> dict[str, Future[T]]:
        """Begin ``call`` on every engine."""
        return {e.url: in_background(partial(call, e)) for e in self.receivers}

    def each(self, call: Callable[[Receiver[H]], T]) -> dict[str, T]:
        """Every engine's answer by URL, when all have come. ``call`` must end in bounded time.

        Raises EngineFaultError naming those whose call raised.
        """
        calls = self.start(call)
        wait(calls.values())
        faults = {url: error for url, future in calls.items() if (error := future.exception())}
        if faults:
            raise EngineFaultError(faults)
        return {url: future.result() for url, future in calls.items()}

    def arrive(
        self,
        calls: Mapping[str, Future[None]],
        timeout_s: float,
        what: str,
        break_off: Callable[[], None],
    ) -> None:
        """Wait for calls in which engines wait for the trainer and for each other.

        On the first failure, or after ``timeout_s``, ``break_off`` frees whoever still waits; then
        raises EngineFaultError naming the engines at fault, where they can be told.
        """
        done, pending = wait(calls.values(), timeout_s, FIRST_EXCEPTION)
        failed = {url: e for url, f in calls.items() if f in done and (e := f.exception())}
        if not pending and not failed:
            return
        late = TransferTimeoutError(f"{what} took longer than {timeout_s:.0f} s")
        reason = next(iter(failed.values()), late)
        break_off()
        done, _ = wait(calls.values(), GRACE_S)
        culprits = {url: failed.get(url, reason) for url in self._lost(calls)}
        refused = {url: e for url, f in calls.items() if f in done and (e := f.exception())}
        if not culprits and (len(refused) < len(calls) or len(calls) == 1):
            culprits = refused  # where all refuse alike, the fault lies between them and us
        raise EngineFaultError(culprits, reason) from reason

    def quarantine(self, label: str) -> None:
        """Pause whoever still answers and take back its version. Never raises."""

        def withdraw(engine: Receiver[H]) -> None:
            if engine.answers(GRACE_S):
                engine.pause()
                engine.set_version(label)

        try:
            self.each(withdraw)
        except EngineFaultError as error:
            log.warning("an engine could not be quarantined: %s", error)

    def _lost(self, calls: Mapping[str, Future[None]]) -> list[str]:
        """Engines that don't come back from their call, or answer nothing at all."""
        answers = self.start(lambda engine: engine.answers(GRACE_S))
        wait(answers.values())
        return [url for url, call in calls.items() if not call.done() or not answers[url].result()]
