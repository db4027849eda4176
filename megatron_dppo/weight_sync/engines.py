"""The engines that take an update together: calls to all at once, the ones at fault, flat bytes; and what a strategy
is, which moves weights to them.

All is seen from one trainer rank. Rank 0 conducts: it alone gives the engines orders. Ranks that a plan names as
receivers gather buckets from the others and send them to the engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from megatron_dppo.engine.errors import UNBOUNDED, EngineError
from megatron_dppo.engine.weights import TAGS, EngineWeights, MemoryTag
from megatron_dppo.model.gather_plan import Bucket as PlannedBucket
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.network import is_loopback, resolve, source_address

T = TypeVar("T")

Bucket = Sequence[tuple[str, Tensor]]
"""Full tensors with their Hugging Face names."""

Plan = Sequence[PlannedBucket]
"""The same on every rank: which tensors, in which buckets, on which rank."""


@dataclass(frozen=True)
class Transfer:
    """What a strategy is given: from trainer rank ``rank`` to ``engines``.

    ``plan``: all buckets, each of ``dtype``. ``timeout_s`` bounds each request to an engine.
    ``directory``: the configured folder, of strategy ``disk``.
    """

    rank: int
    engines: Engines
    plan: Plan
    dtype: torch.dtype
    timeout_s: float
    directory: str | None = None

    @property
    def conducts(self) -> bool:
        return self.rank == 0

    @property
    def sends(self) -> bool:
        return any(bucket.receiver == self.rank for bucket in self.plan)


class Strategy:
    """How buckets get into the attached engines; one object on every rank that takes part.

    Every step but ``abort`` and ``close`` may raise ENGINE_FAULTS; an EngineFaultError names the engines at fault.
    ``spread``: several ranks send, each the buckets that it holds most of; otherwise rank 0 sends all. ``copies``: how
    often a bucket's bytes move.
    """

    spread = False
    copies = 1

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def meeting_point(self) -> Any:
        """What the other ranks must know of this one before ``begin``; JSON."""
        return None

    def begin(self, meeting_points: Sequence[Any]) -> None:
        raise NotImplementedError

    def send(self, bucket: Bucket) -> int:
        """Start to send a bucket that this rank gathered; returns its bytes.

        The bucket may change when two more have been sent.
        """
        raise NotImplementedError

    def arrive(self) -> None:
        """Wait until the engines have this rank's buckets; on rank 0, all buckets."""

    def end(self) -> None:
        """On rank 0, when every rank's buckets have arrived: close the update in the engines."""
        raise NotImplementedError

    def abort(self) -> None:
        """Break off what is under way, without waiting for it."""

    def close(self) -> None:
        """Release what is held in the engines; the strategy is not used again."""
        self.abort()


class TransferTimeoutError(EngineError):
    """A broadcast, or its group, was not complete in time."""


class EngineFaultError(EngineError):
    """What went wrong, by the URL of the engine at fault; ``reason`` where none is. ``attempts``: as of
    EngineError, the least of all of them."""

    def __init__(
        self, faults: Mapping[str, BaseException], reason: BaseException | None = None
    ) -> None:
        errors = list(dict.fromkeys(faults.values())) or ([reason] if reason else [])
        super().__init__("; ".join(f"{type(e).__name__}: {e}" for e in errors))
        self.faults = dict(faults)
        self.attempts = min((getattr(e, "attempts", UNBOUNDED) for e in errors), default=UNBOUNDED)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self.faults)


log = logging.getLogger(__name__)

ENGINE_FAULTS = (EngineError, OSError)
"""What an engine, or the network or disk between, is to blame for: the update has failed, and another attempt may
succeed. Every other error is a fault of this program, and ends the run by its own name."""
GRACE_S = 5.0
"""How long an engine may take to leave a broadcast that was broken off."""
Call: TypeAlias = Callable[[EngineWeights], Coroutine[Any, Any, T]]
OpenEngine: TypeAlias = Callable[[str], Coroutine[Any, Any, EngineWeights]]
"""Connects to the engine at a URL."""


class Engines:
    """One engine or more; each call below goes to all of them at the same time.

    ``runner`` runs the calls, so that this rank's threads may wait for them or do other work.
    """

    def __init__(self, members: Sequence[EngineWeights], runner: AsyncRunner) -> None:
        self.members = tuple(members)
        self._runner = runner

    @classmethod
    def connect(cls, urls: Sequence[str], open_engine: OpenEngine, runner: AsyncRunner) -> Self:
        """Open the engines at ``urls`` at the same time.

        Raises EngineFaultError naming those that don't answer as they must, or don't fit.
        """
        opening = {url: runner.submit(open_engine(url)) for url in urls}
        wait(opening.values())
        errors = _errors(opening)
        engines = cls([f.result() for url, f in opening.items() if url not in errors], runner)
        if errors:
            engines.close()
            raise EngineFaultError(errors)
        return engines

    @property
    def first(self) -> EngineWeights:
        """The one that knows the format for all: they serve the same model."""
        return self.members[0]

    @property
    def ranks(self) -> int:
        return sum(engine.ranks for engine in self.members)

    @cached_property
    def foreign_hosts(self) -> list[str]:
        away = [str(urlsplit(e.url).hostname) for e in self.members if not on_this_host(e.url)]
        return list(dict.fromkeys(away))

    def first_ranks(self) -> dict[str, int]:
        """By URL, an engine's first rank in a broadcast group whose rank 0 is a trainer's."""
        ranks, first = {}, 1
        for engine in self.members:
            ranks[engine.url] = first
            first += engine.ranks
        return ranks

    def start(self, call: Call[T]) -> dict[str, Future[T]]:
        return {e.url: self._runner.submit(call(e)) for e in self.members}

    def each(self, call: Call[T]) -> dict[str, T]:
        """Every engine's answer by URL, when all have come. ``call`` must end in bounded time.

        Raises EngineFaultError naming those whose call raised.
        """
        calls = self.start(call)
        # All of them, also after a failure: a call that goes on would meet the next step's at its engine.
        wait(calls.values())
        if errors := _errors(calls):
            raise EngineFaultError(errors)
        return {url: future.result() for url, future in calls.items()}

    def arrive(
        self,
        calls: Mapping[str, Future[None]],
        timeout_s: float,
        step: str,
        break_off: Callable[[], None],
    ) -> None:
        """Wait for calls in which engines wait for the trainer and for each other.

        On the first failure, or after ``timeout_s``, ``break_off`` frees whoever still waits; then
        raises EngineFaultError naming the engines at fault, where they can be told.
        """
        _, pending = wait(calls.values(), timeout_s, FIRST_EXCEPTION)
        failed = _errors(calls)
        if not pending and not failed:
            return
        late = TransferTimeoutError(f"{step} took longer than {timeout_s:.0f} s")
        reason = next(iter(failed.values()), late)
        break_off()
        # Whoever only waited for the one at fault comes back now.
        wait(calls.values(), GRACE_S)
        culprits = {url: failed.get(url, reason) for url in self._lost(calls)}
        refused = _errors(calls)
        # Where all refuse alike, the fault lies between them and us.
        if not culprits and (len(refused) < len(calls) or len(calls) == 1):
            culprits = refused
        raise EngineFaultError(culprits, reason) from reason

    def drain(self, timeout_s: float) -> list[str]:
        """Let running requests finish, then pause; the URLs of engines where they didn't finish.

        Where one is busy beyond ``timeout_s``, all go on generating.
        """
        idle = self.each(lambda engine: engine.pause_when_idle(timeout_s))
        busy = [url for url, is_idle in idle.items() if not is_idle]
        if busy:
            self.each(lambda engine: engine.resume())
        return busy

    def interrupt(self) -> list[str]:
        """Pause all in the middle of their responses, which go on with other weights; nobody is ever too busy."""
        self.each(lambda engine: engine.interrupt())
        return []

    def commit(self, version: int) -> None:
        """``weight_version`` becomes ``str(version)`` everywhere; then generation goes on."""
        # In two rounds: nobody generates as long as an engine may still refuse the version.
        self.each(lambda engine: engine.set_version(str(version)))
        self.each(lambda engine: engine.resume())

    def quarantine(self, label: str) -> None:
        """Pause every engine that answers and give it the version ``label``. Never raises."""

        async def withdraw(engine: EngineWeights) -> None:
            if await engine.schedules(GRACE_S):
                # Before it is renamed, so that nothing is sampled in between.
                await engine.pause()
                await engine.set_version(label)

        try:
            self.each(withdraw)
        except EngineFaultError as error:
            log.warning("an engine could not be quarantined: %s", error)

    def restore_released(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Every engine takes what it has released of ``tags`` again; one that was started anew has released nothing."""

        async def restore(engine: EngineWeights) -> None:
            if released := engine.occupation.released & set(tags):
                await engine.restore(released)

        self.each(restore)

    def release(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Every engine lets go of the memory of ``tags``; see ``EngineWeights.release``."""
        self.each(lambda engine: engine.release(tags))

    def close(self) -> None:
        self.each(lambda engine: engine.close())

    def _lost(self, calls: Mapping[str, Future[None]]) -> list[str]:
        """Engines that don't come back from their call, or answer nothing at all."""
        answers = self.start(lambda engine: engine.answers(GRACE_S))
        wait(answers.values())
        return [url for url, call in calls.items() if not call.done() or not answers[url].result()]


async def let_go(engine: EngineWeights, tags: Collection[MemoryTag]) -> None:
    """Have ``engine`` stop in the middle of its responses and release what it still has of the memory of ``tags``."""
    if resident := [tag for tag in tags if tag not in engine.occupation.released]:
        await engine.interrupt()
        await engine.release(resident)


def _errors(calls: Mapping[str, Future[Any]]) -> dict[str, BaseException]:
    """What engines or the ways to them are to blame for, by URL, of the calls that have ended. Raises any other error:
    that is ours."""
    errors = {url: e for url, f in calls.items() if f.done() and (e := f.exception())}
    for error in errors.values():
        if not isinstance(error, ENGINE_FAULTS):
            raise error
    return errors


class Packer:
    """Puts a bucket's tensors into the flat bytes that engines take.

    ``pieces`` gives the 1-D ``uint8`` pieces of a bucket in the engines' order. Others than those that lie one after
    another in memory are copied into one of two buffers that take turns: it holds until the second call after.
    """

    def __init__(self, pieces: Callable[[Bucket], list[Tensor]]) -> None:
        self._pieces = pieces
        self._buffers: list[Tensor | None] = [None, None]

    def pack(self, bucket: Bucket) -> Tensor:
        """The flat bytes; a view of the bucket's own memory where that is possible."""
        pieces = self._pieces(bucket)
        flat = adjacent(pieces)
        return self._copied(pieces, _plain) if flat is None else flat

    def copy(self, bucket: Bucket, allocate: Callable[[int, torch.device], Tensor]) -> Tensor:
        """The flat bytes in memory that came from ``allocate(bytes, device)``."""
        return self._copied(self._pieces(bucket), allocate)

    def _copied(
        self, pieces: list[Tensor], allocate: Callable[[int, torch.device], Tensor]
    ) -> Tensor:
        size = sum(piece.numel() for piece in pieces)
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[0] = allocate(size, pieces[0].device)
        return torch.cat(pieces, out=buffer[:size])


def adjacent(pieces: Sequence[Tensor]) -> Tensor | None:
    """The 1-D pieces as one view of the memory in which they lie without a gap; None otherwise."""
    first, end = pieces[0], pieces[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for piece in pieces:
        # Neighbours in memory may be two allocations, which no view spans.
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != storage:
            return None
        end += piece.numel()
    return first.as_strided((end - first.data_ptr(),), (1,), first.storage_offset())


def _plain(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def local_address(url: str) -> str:
    """This machine's address on the network that leads to ``url``; loopback for an engine on the same machine."""
    return source_address(str(urlsplit(url).hostname))


def meeting_address(urls: Sequence[str]) -> str:
    """An address of this machine that the engines at all ``urls`` reach.

    An engine on this machine reaches each of its addresses, one elsewhere only that of its network; loopback where
    all are here.
    """
    addresses = dict.fromkeys(local_address(url) for url in urls)
    routable = [address for address in addresses if not is_loopback(address)]
    return (routable or list(addresses))[0]


def on_this_host(url: str) -> bool:
    """Whether packets to ``url`` stay on this machine."""
    return local_address(url) == resolve(str(urlsplit(url).hostname))
