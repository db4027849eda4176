"""Keeps one server alive: starts it, publishes where it is, starts it again when it dies or hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from megatron_dppo.fleet.folder import FleetFolder, Server
from megatron_dppo.system.processes import describe_exit

log = logging.getLogger(__name__)

_PROGRESS_S = 10.0
_RESTART_TAIL_LINES = 10
_DYING_S = 0.1
"""A client sees a killed server's connections break some milliseconds before its exit shows."""


class EngineGivenUpError(RuntimeError):
    """The engine failed for good; the message holds the end of its log."""


class Engine(Protocol):
    """One start of a server, as ``megatron_dppo.engine.child_server.ChildServer`` is one."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def start(self) -> None:
        """Start the process and return at once; called from the main thread."""

    def wait_healthy(self, on_progress: Callable[[float, str], None] | None = None) -> float:
        """Block until it answers; the seconds that took. Raises an error that holds its log's
        end."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def stop(self) -> None:
        """End it in peace, then by force."""

    def kill(self) -> None:
        """End it and its descendants by force; returns when they are gone. May be called again."""

    def log_tail(self, lines: int) -> str:
        """The last lines of its log."""


class EngineKeeper:
    """One server of a run, or its router, through its incarnations 1, 2, ...: at most
    ``max_restarts`` beyond the first.

    ``make_engine(incarnation)`` makes one that was not started. ``name``: under which it is
    published; ``what``: its name in messages. All methods are called from the main thread.
    """

    def __init__(
        self,
        name: str,
        make_engine: Callable[[int], Engine],
        folder: FleetFolder,
        *,
        max_restarts: int,
        what: str = "the engine",
    ) -> None:
        self.name = name
        self.what = what
        self._make_engine = make_engine
        self._folder = folder
        self._max_restarts = max_restarts
        self._engine: Engine | None = None
        self._starting: Future[float] | None = None
        self._waiter = ThreadPoolExecutor(1, f"start-{name}")
        self._next_progress = 0.0
        self.incarnation = 0

    def start(self) -> None:
        """Start the next incarnation and return at once; :meth:`check` publishes it when it is
        healthy."""
        self.incarnation += 1
        self._next_progress = _PROGRESS_S
        self._engine = self._make_engine(self.incarnation)
        try:
            self._engine.start()
        except RuntimeError as error:
            self._starting = Future()
            self._starting.set_exception(error)
            return
        self._starting = self._waiter.submit(self._engine.wait_healthy, self._progress)

    def check(self) -> None:
        """Publish a server that became healthy; restart one that died, or was reported lost.

        A hung process runs on, so only its clients can tell; a report on an earlier incarnation
        comes too late and is dropped.

        Raises EngineGivenUpError when the first start failed, or the restarts are used up.
        """
        assert self._engine is not None
        if self._starting is not None:
            self._check_start(self._engine, self._starting)
            return
        reported = self._folder.take_report(self.name) == self.incarnation
        if reported and self._engine.poll() is None:
            time.sleep(_DYING_S)
        code = self._engine.poll()
        if code is not None:
            tail = self._engine.log_tail(_RESTART_TAIL_LINES)
            self._restart(f"{self.what} {describe_exit(code)}; the end of its log:\n{tail}")
        elif reported:
            tail = self._engine.log_tail(_RESTART_TAIL_LINES)
            self._restart(
                f"{self.what} runs but was reported lost by the trainer; the end of its log:\n{tail}"
            )

    def stop(self, *, at_once: bool) -> None:
        """End the server, by force where ``at_once``, and withdraw it."""
        self._folder.withdraw(self.name)
        if self._engine is not None:
            if at_once or self._starting is not None:
                self._engine.kill()
            else:
                self._engine.stop()
        self._waiter.shutdown()

    def _check_start(self, engine: Engine, starting: Future[float]) -> None:
        if not starting.done():
            return
        self._starting = None
        error = starting.exception()
        if error is None:
            self._folder.publish(Server(self.name, engine.url, self.incarnation, engine.pid))
            log.info("%s ready after %.0f s at %s", self.what, starting.result(), engine.url)
            return
        if not isinstance(error, RuntimeError):
            raise error
        if self.incarnation == 1:
            raise EngineGivenUpError(f"{self.what} did not start: {error}")
        self._restart(f"{self.what} did not start again: {error}")

    def _restart(self, reason: str) -> None:
        assert self._engine is not None
        self._folder.withdraw(self.name)
        self._engine.kill()
        if self.incarnation > self._max_restarts:
            raise EngineGivenUpError(
                f"{reason}\ngiving up after {self._max_restarts} restarts (engine.max_restarts)"
            )
        log.warning("%s\nrestart %d of %d", reason, self.incarnation, self._max_restarts)
        self.start()

    def _progress(self, seconds: float, line: str) -> None:
        if seconds >= self._next_progress:
            self._next_progress = seconds + _PROGRESS_S
            log.info("%s is starting, %.0f s: %s", self.what, seconds, line.strip()[:100])
