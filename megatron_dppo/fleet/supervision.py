"""The servers of a run and their HTTP router, kept alive: the run goes on while one server is left.

A server that is healthy is published in the run's folder; one that died, or that the ranks reported
lost, is withdrawn and started again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from megatron_dppo.engine.errors import PortHeldError
from megatron_dppo.engine.process import ChildServer
from megatron_dppo.fleet.endpoint import FleetEndpoint
from megatron_dppo.fleet.folder import FleetFolder, Keys, Server
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import describe_exit, quote

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class RestartBudget:
    """At most ``limit`` restarts of one server within any ``window_s`` seconds.

    Before the first one in a window it pauses for ``first_pause_s``, before each further one twice as
    long as before the last, and never longer than LONGEST_PAUSE_S.

    Args:
        limit: restarts within a window.
        window_s: its length in seconds.
        clock: tells the time in seconds.
        first_pause_s: before the first restart.
    """

    def __init__(
        self,
        limit: int,
        window_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        self.clock = clock
        self._first_pause = first_pause_s
        self._taken: list[float] = []

    def take(self) -> float | None:
        """Use up one restart: the seconds to wait before it, or None where the window has none left."""
        now = self.clock()
        self._taken = [at for at in self._taken if at > now - self.window_s]
        if len(self._taken) >= self.limit:
            return None
        pause = self.pause(len(self._taken))
        self._taken.append(now)
        return pause

    @property
    def taken(self) -> int:
        """Restarts in the window, at the time of the last ``take``."""
        return len(self._taken)

    def pause(self, before: int) -> float:
        """Seconds to wait where ``before`` attempts came to nothing."""
        return min(self._first_pause * 2.0 ** min(before, 30), LONGEST_PAUSE_S)


log = logging.getLogger(__name__)

_PROGRESS_S = 60.0
_RESTART_TAIL_LINES = 10
_PORT_PATIENCE_S = 60.0
_DYING_S = 0.1
"""A client sees a killed server's connections break some milliseconds before its exit shows."""


class EngineGivenUpError(RunError):
    """The engine failed for good; the message holds the end of its log."""


class FirstStartError(EngineGivenUpError):
    """A server did not come up the first time: it is given up, unless :meth:`SupervisedServer.retry` follows."""


class SupervisedServer:
    """One server of a run, or its HTTP router, through its incarnations 1, 2, ...

    All methods are called from the main thread.

    Args:
        name: under which it is published.
        make_process: makes the process of an incarnation, not started.
        folder: where it is published.
        budget: how often, and how soon, it is started again. A start that failed because somebody
            else has its port costs none of it: that is waited for.
        what: its name in messages.
    """

    def __init__(
        self,
        name: str,
        make_process: Callable[[int], ChildServer],
        folder: FleetFolder,
        *,
        budget: RestartBudget,
        what: str = "the engine",
    ) -> None:
        self.name = name
        self.what = what
        self._make_process = make_process
        self._folder = folder
        self._budget = budget
        self._process: ChildServer | None = None
        self._starting: Future[float] | None = None
        self._waiter = ThreadPoolExecutor(1, f"start-{name}")
        self._next_progress = 0.0
        self._published: Server | None = None
        self._due: float | None = None
        self._held: tuple[float, int] | None = None
        self.incarnation = 0

    @property
    def is_published(self) -> bool:
        """Whether it is healthy, as far as is known."""
        return self._published is not None

    def start(self) -> None:
        """Start the next incarnation and return at once; :meth:`check` publishes it when it is
        healthy."""
        self.incarnation += 1
        self._next_progress = _PROGRESS_S
        self._process = self._make_process(self.incarnation)
        try:
            self._process.start()
        except RunError as error:
            self._starting = Future()
            self._starting.set_exception(error)
            return
        self._starting = self._waiter.submit(self._process.wait_healthy, self._progress)

    def check(self) -> None:
        """Publish a server that became healthy; restart one that died, or was reported lost.

        A hung process runs on, so only its clients can tell; a report on an earlier incarnation
        comes too late and is dropped.

        Raises FirstStartError once when the first start failed, EngineGivenUpError when the restarts
        are used up.
        """
        if self._due is not None:
            if self._budget.clock() >= self._due:
                self._due = None
                self.start()
            return
        assert self._process is not None
        if self._starting is not None:
            self._check_start(self._process, self._starting)
            return
        reported = self._folder.take_report(self.name) == self.incarnation
        if reported and self._process.poll() is None:
            time.sleep(_DYING_S)
        code = self._process.poll()
        if code is not None:
            tail = quote(self._process.log_tail(_RESTART_TAIL_LINES))
            self._restart(f"{self.what} {describe_exit(code)}; the end of its log:\n{tail}")
        elif reported:
            tail = quote(self._process.log_tail(_RESTART_TAIL_LINES))
            self._restart(
                f"{self.what} runs but was reported lost by the trainer; the end of its log:\n{tail}"
            )

    def retry(self, reason: FirstStartError) -> None:
        """Start again after a first start that failed. Raises EngineGivenUpError as :meth:`check`."""
        self._restart(str(reason))

    def stop(self, *, at_once: bool) -> None:
        """End the server, by force where ``at_once``, and withdraw it."""
        self._withdraw()
        if self._process is not None:
            if at_once or self._starting is not None:
                self._process.kill()
            else:
                self._process.stop()
        self._waiter.shutdown()

    def _check_start(self, process: ChildServer, starting: Future[float]) -> None:
        if not starting.done():
            return
        self._starting = None
        error = starting.exception()
        if error is None:
            self._held = None
            self._published = Server(self.name, process.url, self.incarnation, process.pid)
            self._folder.publish(self._published)
            log.info("%s ready after %.0f s at %s", self.what, starting.result(), process.url)
            return
        if not isinstance(error, RunError):
            raise error
        if isinstance(error, PortHeldError):
            self._wait_for_port(error)
        elif self.incarnation == 1:
            raise FirstStartError(f"{self.what} did not start: {error}")
        else:
            self._restart(f"{self.what} did not start again: {error}")

    def _restart(self, reason: str) -> None:
        assert self._process is not None
        self._withdraw()
        self._process.kill()
        budget = self._budget
        pause = budget.take()
        if pause is None:
            raise EngineGivenUpError(
                f"{reason}\ngiving up after {budget.limit} restarts within {budget.window_s:.0f} s "
                "(engine.max_restarts, engine.restart_window_s)"
            )
        log.warning("%s\nrestart %d of %d in %.0f s", reason, budget.taken, budget.limit, pause)
        self._due = budget.clock() + pause

    def _wait_for_port(self, error: PortHeldError) -> None:
        """Try again soon: who has the port may be about to end."""
        now = self._budget.clock()
        since, tries = self._held or (now, 0)
        if now > since + _PORT_PATIENCE_S:
            raise EngineGivenUpError(f"{self.what} did not start in {now - since:.0f} s: {error}")
        if not tries:
            log.warning("%s waits for its port: %s", self.what, error)
        self._held = (since, tries + 1)
        self._due = now + self._budget.pause(tries)

    def _withdraw(self) -> None:
        if self._published is not None:
            self._folder.withdraw_own(self._published)
            self._published = None

    def _progress(self, seconds: float, stage: str) -> None:
        if seconds >= self._next_progress:
            self._next_progress = seconds + _PROGRESS_S
            log.info("%s is starting, %.0f s: %s", self.what, seconds, stage)


class SupervisedFleet:
    """The servers of a run and its HTTP router, supervised together.

    All methods are called from the main thread.

    Args:
        servers: may be empty where others run elsewhere.
        router: None where the run has none.
        folder: where the processes are published.
        keys: what clients of these processes must show; they reach no file.
        endpoint: offers ``folder`` to ranks and commands; None in tests of the processes alone.
    """

    def __init__(
        self,
        servers: Sequence[SupervisedServer],
        router: SupervisedServer | None,
        folder: FleetFolder,
        keys: Keys,
        endpoint: FleetEndpoint | None = None,
    ) -> None:
        self._servers = list(servers)
        self._router = router
        self._folder = folder
        self.keys = keys
        self._endpoint = endpoint
        self._ended: list[SupervisedServer] = []
        self._first_failed: dict[SupervisedServer, FirstStartError] = {}
        self._proven = False

    @property
    def rank_variables(self) -> dict[str, str]:
        """The environment in which ranks find the servers and their keys."""
        endpoint = {} if self._endpoint is None else self._endpoint.variables
        return {**self.keys.to_variables(), **endpoint}

    def start(self) -> None:
        """Start every process and return at once."""
        if self._endpoint is not None:
            self._endpoint.start()
        for server in self._running():
            server.start()

    def check(self) -> None:
        """Publish servers that became healthy, restart those that died.

        A server whose first start failed is restarted once another one, of the same configuration, has
        started; where none does, all are given up at once: the configuration is at fault.

        Raises EngineGivenUpError when the last server is given up and none is attached.
        """
        for server in [s for s in self._servers if s not in self._first_failed]:
            self._keep(server, server.check)
        self._decide_first_failed()
        if self._router is not None:
            try:
                self._router.check()
            except EngineGivenUpError as error:
                log.error("%s\ngoing on without a router", error)
                self._ended.append(self._router)
                self._router = None

    def stop(self, *, at_once: bool) -> None:
        """End all of them at the same time."""
        everything = [*self._running(), *self._ended]
        with ThreadPoolExecutor(max(1, len(everything)), "stop") as pool:
            for ended in [pool.submit(server.stop, at_once=at_once) for server in everything]:
                ended.result()
        if self._endpoint is not None:
            self._endpoint.stop()

    def _running(self) -> list[SupervisedServer]:
        return self._servers + ([self._router] if self._router is not None else [])

    def _keep(self, server: SupervisedServer, step: Callable[[], None]) -> None:
        """Take ``step`` of ``server``, and note what comes of it."""
        try:
            step()
        except FirstStartError as error:
            self._first_failed[server] = error
        except EngineGivenUpError as error:
            self._give_up_server(server, error)
        self._proven = self._proven or server.is_published

    def _decide_first_failed(self) -> None:
        if not self._proven and len(self._first_failed) < len(self._servers):
            return
        failed, self._first_failed = self._first_failed, {}
        for server, error in failed.items():
            if self._proven:
                self._keep(server, partial(server.retry, error))
            else:
                self._give_up_server(server, error)

    def _give_up_server(self, server: SupervisedServer, error: EngineGivenUpError) -> None:
        self._servers.remove(server)
        self._ended.append(server)
        attached = [s for s in self._folder.servers() if not s.replaceable]
        if not self._servers and not attached:
            raise error
        left = len(self._servers) + len(attached)
        log.error("%s\ngoing on with the other servers, %d", error, left)
