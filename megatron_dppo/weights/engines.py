"""The engines of one update, all called at the same time.

Every object here belongs to one trainer rank. Rank 0 alone pauses, verifies and resumes the engines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import cached_property
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from torch import Tensor

from megatron_dppo.engine.errors import UNBOUNDED, EngineError, EngineMismatchError
from megatron_dppo.engine.options import FIRST_WEIGHT_VERSION
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.mapping import engine_inputs
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.system.network import is_loopback, resolve, source_address
from megatron_dppo.weights.engine_weights import TAGS, EngineWeights
from megatron_dppo.weights.links import CalledOffError
from megatron_dppo.weights.server.server_state import MemoryTag

T = TypeVar("T")

Bucket = Sequence[tuple[str, Tensor]]
"""Full tensors with their Hugging Face names."""


class TransferTimeoutError(EngineError):
    """A transfer, or the creation of its group, exceeded its time limit."""


class EngineFaultError(EngineError):
    """One or more engines failed.

    Attributes:
        faults: the exception of each engine at fault, by its URL; empty if only a ``reason`` is known.
        attempts: the smallest ``attempts`` of these exceptions; see EngineError.
    """

    def __init__(
        self, faults: Mapping[str, BaseException], reason: BaseException | None = None
    ) -> None:
        # Several engines may have the same exception.
        errors = list(dict.fromkeys(faults.values()))
        if not errors and reason is not None:
            errors = [reason]
        super().__init__("; ".join(f"{type(e).__name__}: {e}" for e in errors))
        self.faults = dict(faults)
        self.attempts = min((getattr(e, "attempts", UNBOUNDED) for e in errors), default=UNBOUNDED)

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self.faults)


log = logging.getLogger(__name__)

ENGINE_FAULTS = (EngineError, OSError)
"""Exceptions caused by an engine, the network or a disk: the update failed, and another attempt may succeed. Every
other exception is a fault of this program and ends the run."""
_CALLED_OFF_POLL_S = 0.5
GRACE_S = 5.0
"""Seconds that an engine may take to leave a cancelled transfer."""
Call: TypeAlias = Callable[[EngineWeights], Coroutine[Any, Any, T]]
OpenEngine: TypeAlias = Callable[[str], Coroutine[Any, Any, EngineWeights]]
"""A coroutine function that connects to the engine at a URL."""
Digests: TypeAlias = Mapping[tuple[EngineLayout, str], Sequence[Mapping[str, str]]]
"""The expected checksums of all tensors. For each layout of an engine, a list has one mapping for each engine rank,
from a tensor's name to its checksum."""


class Engines:
    """One or more engines. Each method calls all of them at the same time.

    ``runner`` runs the calls, so that this rank's threads can wait for them or do other work.
    """

    def __init__(self, members: Sequence[EngineWeights], runner: AsyncRunner) -> None:
        self.members = tuple(members)
        self._runner = runner

    @classmethod
    def connect(cls, urls: Sequence[str], open_engine: OpenEngine, runner: AsyncRunner) -> Self:
        """Open the engines at ``urls`` at the same time.

        Raises EngineFaultError that names each engine that does not answer, or does not match the run.
        """
        opening = {url: runner.submit(open_engine(url)) for url in urls}
        wait(opening.values())
        errors = _errors(opening)
        members = [call.result() for url, call in opening.items() if url not in errors]
        engines = cls(members, runner)
        if errors:
            engines.close()
            raise EngineFaultError(errors)
        return engines

    @property
    def first(self) -> EngineWeights:
        """The first engine. All engines serve the same model, so what it needs to know of the model holds for all."""
        return self.members[0]

    @property
    def ranks(self) -> int:
        return sum(engine.ranks for engine in self.members)

    @property
    def take_changes(self) -> bool:
        """Whether the engines can apply changes to the weights that they hold."""
        return self.first.tensors.hold_what_is_sent

    def inputs(self, name: str) -> list[str]:
        """Return the names under which a tensor of a checkpoint must be in a folder that all engines read.

        SGLang's own loader needs some tensors under two names; direct placement needs each tensor once.
        """
        if all(engine.places_directly for engine in self.members):
            return [name]
        return engine_inputs(self.first.tensors.shape, name)

    @cached_property
    def foreign_hosts(self) -> list[str]:
        """The hosts of engines that are not on this host, each once."""
        hosts = dict.fromkeys(foreign_host(engine.url) for engine in self.members)
        return [host for host in hosts if host is not None]

    def first_ranks(self, first_rank: int) -> dict[str, int]:
        """Return each engine's first rank in a group, by URL. ``first_rank``: the first rank of the first engine."""
        ranks: dict[str, int] = {}
        for engine in self.members:
            ranks[engine.url] = first_rank
            first_rank += engine.ranks
        return ranks

    def start(self, call: Call[T]) -> dict[str, Future[T]]:
        """Start ``call`` for every engine. Returns the futures by URL."""
        return {e.url: self._runner.submit(call(e)) for e in self.members}

    def each(self, call: Call[T]) -> dict[str, T]:
        """Run ``call`` for every engine, wait for all, and return the results by URL. ``call`` must end in bounded
        time.

        Raises EngineFaultError that names the engines whose call raised.
        """
        calls = self.start(call)
        # Wait for every call, also after a failure: a call still running would overlap with the next one.
        wait(calls.values())
        if errors := _errors(calls):
            raise EngineFaultError(errors)
        return {url: future.result() for url, future in calls.items()}

    def arrive(
        self,
        calls: Mapping[str, Future[None]],
        timeout_s: float,
        step: str,
        break_off: Callable[[], None] | None = None,
        is_called_off: Callable[[], bool] | None = None,
    ) -> None:
        """Wait for ``calls``. In these calls the engines receive weights from the trainer, or join a group.

        At the first failure, or after ``timeout_s``, ``break_off`` is called: it frees engines that wait for each other
        in these calls. It is None if engines do not wait for each other. ``is_called_off`` tells whether a trainer rank
        has given up, for which the engines wait in vain.

        Raises:
            EngineFaultError: names the engines at fault, if they can be determined.
            CalledOffError: a trainer rank has given up.
        """
        deadline = time.monotonic() + timeout_s
        poll_s = timeout_s if is_called_off is None else _CALLED_OFF_POLL_S
        while True:
            remaining_s = max(deadline - time.monotonic(), 0.0)
            _, pending = wait(calls.values(), min(poll_s, remaining_s), FIRST_EXCEPTION)
            failed = _errors(calls)
            if not pending and not failed:
                return
            if failed or time.monotonic() >= deadline:
                break
            if is_called_off is not None and is_called_off():
                wait(calls.values(), GRACE_S)
                raise CalledOffError(f"{step}: another trainer rank called the weight transfer off")
        timeout_error = TransferTimeoutError(f"{step} took longer than {timeout_s:.0f} s")
        reason = next(iter(failed.values()), timeout_error)
        if break_off is not None:
            break_off()
        # Engines that only waited for the engine at fault return now.
        wait(calls.values(), GRACE_S)
        # Name the lost engines. If no engine is lost, name the engines whose calls failed.
        faults = {url: failed.get(url, reason) for url in self._lost(calls)}
        errors = _errors(calls)
        # If no engine is lost and the calls of all of several engines failed, name no engine: the fault probably lies
        # between this rank and the engines.
        is_common_fault = len(calls) > 1 and len(errors) == len(calls)
        if not faults and not is_common_fault:
            faults = errors
        raise EngineFaultError(faults, reason) from reason

    def drain(self, timeout_s: float) -> list[str]:
        """Wait for running requests, then pause. Returns the URLs of engines whose requests did not finish.

        If an engine is busy for longer than ``timeout_s``, all engines generate again.
        """
        is_idle_by_url = self.each(lambda engine: engine.pause_when_idle(timeout_s))
        busy_urls = [url for url, is_idle in is_idle_by_url.items() if not is_idle]
        if busy_urls:
            self.each(lambda engine: engine.resume())
        return busy_urls

    def interrupt(self) -> list[str]:
        """Pause all engines in the middle of their responses. The responses continue later with other weights.

        Returns no URLs, because no engine has to finish its responses; see ``drain``.
        """
        self.each(lambda engine: engine.interrupt())
        return []

    def restarted(self) -> list[str]:
        """Return the URLs of engines that were started again: they have the version of a server before any update."""
        versions = self.each(lambda engine: engine.version())
        return [url for url, version in versions.items() if version == str(FIRST_WEIGHT_VERSION)]

    def set_version(self, version: str) -> None:
        """Set ``weight_version`` on every engine."""
        self.each(lambda engine: engine.set_version(version))

    def commit(self, version: int) -> None:
        """Set ``weight_version`` to ``str(version)`` on every engine, then resume generation."""
        # Make two rounds of calls: no engine may generate while another engine can still refuse the version.
        self.set_version(str(version))
        self.each(lambda engine: engine.resume())

    def flush(self) -> None:
        """Flush the prefix cache of every engine."""
        self.each(lambda engine: engine.flush())

    def drop_adapters(self, *, kept: str | None) -> None:
        """Unload every adapter except ``kept`` on every engine."""
        self.each(lambda engine: engine.drop_adapters(kept=kept))

    def quarantine(self, label: str) -> None:
        """Pause every engine that answers, and set its version to ``label``. Never raises."""

        async def withdraw(engine: EngineWeights) -> None:
            if await engine.is_scheduling(GRACE_S):
                # Pause first, so that the engine samples no token under the new label.
                await engine.pause()
                await engine.set_version(label)

        try:
            self.each(withdraw)
        except EngineFaultError as error:
            log.warning("an engine could not be quarantined: %s", error)

    def return_to(self, version: int, digests: Digests, suspects: Collection[str]) -> None:
        """Make every engine that still holds ``version`` serve this version again after an interrupted update.

        An engine holds the version if its tensors have the checksums ``digests``. Other engines, and engines that fail
        here, stay unverified, and the log names them. ``suspects``: URLs of engines that may not answer.
        """

        async def resume(engine: EngineWeights) -> str:
            if engine.url in suspects and not await engine.is_scheduling(GRACE_S):
                return "stays unverified: it does not answer"
            # Drop the messages or changes that the engine received and has not applied.
            await engine.abandon()
            if await engine.checksums() != list(digests[engine.layout]):
                return f"stays unverified: its weights are no longer those of version {version}"
            await engine.flush()
            await engine.set_version(str(version))
            await engine.resume()
            return f"serves weight version {version} again"

        calls = self.start(resume)
        wait(calls.values())
        errors = _errors(calls)
        for url, call in calls.items():
            outcome = f"stays unverified: {errors[url]}" if url in errors else call.result()
            log.warning("%s %s", url, outcome)

    def restore_released(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Restore the memory of ``tags`` that each engine has released. A restarted engine has released nothing."""

        async def restore(engine: EngineWeights) -> None:
            released_tags = engine.occupation.released & set(tags)
            if released_tags:
                await engine.restore(released_tags)

        self.each(restore)

    def release(self, tags: Collection[MemoryTag] = TAGS) -> None:
        """Release the memory of ``tags`` on every engine; see ``EngineWeights.release``."""
        self.each(lambda engine: engine.release(tags))

    def interrupt_and_release(self, tags: Collection[MemoryTag]) -> None:
        """Interrupt every engine's responses, and release its memory of ``tags``."""
        self.each(lambda engine: interrupt_and_release(engine, tags))

    def close(self) -> None:
        """Close the connections to all engines."""
        self.each(lambda engine: engine.close())

    def _lost(self, calls: Mapping[str, Future[None]]) -> list[str]:
        """Return the URLs of engines that answer no request within GRACE_S. If all answer, return the URLs of engines
        whose call has not returned.

        An engine that answers may still wait for a dead engine: nothing frees a rank that joins a gloo group.
        """
        answers = self.start(lambda engine: engine.is_answering(GRACE_S))
        wait(answers.values())
        silent_urls = [url for url in calls if not answers[url].result()]
        if silent_urls:
            return silent_urls
        return [url for url, call in calls.items() if not call.done()]


async def interrupt_and_release(engine: EngineWeights, tags: Collection[MemoryTag]) -> None:
    """Interrupt the responses of ``engine``, and release the memory of ``tags`` that it still holds.

    If the engine holds no memory of ``tags``, do nothing.
    """
    resident_tags = [tag for tag in tags if tag not in engine.occupation.released]
    if resident_tags:
        await engine.interrupt()
        await engine.release(resident_tags)


def _errors(calls: Mapping[str, Future[Any]]) -> dict[str, BaseException]:
    """Return the exceptions of the calls that have failed, by URL. Raises an exception that is not in ENGINE_FAULTS."""
    errors: dict[str, BaseException] = {}
    for url, call in calls.items():
        error = call.exception() if call.done() else None
        if error is None:
            continue
        if not isinstance(error, ENGINE_FAULTS):
            raise error
        errors[url] = error
    return errors


def local_address(url: str) -> str:
    """Return this machine's source address of packets to ``url``; loopback if the engine is at loopback."""
    return source_address(str(urlsplit(url).hostname))


def meeting_address(urls: Sequence[str]) -> str:
    """Return an address of this machine that the engines at all ``urls`` can reach.

    An engine on this machine reaches every address of this machine. An engine on another host reaches only the address
    on the network between both hosts. The result is loopback if all engines are at loopback.
    """
    addresses = [local_address(url) for url in urls]
    for address in addresses:
        if not is_loopback(address):
            return address
    return addresses[0]


def on_this_host(url: str) -> bool:
    """Whether packets to ``url`` stay on this machine."""
    return local_address(url) == resolve(str(urlsplit(url).hostname))


def foreign_host(url: str) -> str | None:
    """Return the host of an engine; None for this machine."""
    return None if on_this_host(url) else str(urlsplit(url).hostname)


def require_routable(urls: Sequence[str]) -> None:
    """Raise EngineMismatchError if some engines are at loopback and others are not: they could not connect."""
    loopback_urls: list[str] = []
    routable_urls: list[str] = []
    for url in urls:
        if is_loopback(str(urlsplit(url).hostname)):
            loopback_urls.append(url)
        else:
            routable_urls.append(url)
    if loopback_urls and routable_urls:
        raise EngineMismatchError(
            f"the engine at {loopback_urls[0]} listens on loopback, where the engine "
            f"at {routable_urls[0]} can't reach it; expected an address of this machine in engine.host"
        )
