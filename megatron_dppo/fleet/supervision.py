"""Supervision of a run's servers and their HTTP router: the run continues while one server is left.

A healthy server is published in the run's folder. A server that died, or that the ranks reported lost, is withdrawn and
restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field

from megatron_dppo.engine.errors import PortHeldError
from megatron_dppo.engine.process import ChildServer
from megatron_dppo.fleet.endpoint import FleetEndpoint
from megatron_dppo.fleet.record import FleetRecord, Keys, Server
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import describe_exit, quote

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
_PROGRESS_S = 60.0
_RESTART_TAIL_LINES = 10
_PORT_PATIENCE_S = 60.0
# A client sees a killed server's connections break some milliseconds before the process has ended.
_DYING_S = 0.1


@dataclass(eq=False)
class RestartBudget:
    """At most ``limit`` restarts of one server within any ``window_s`` seconds.

    The pause before the first restart in a window is ``first_pause_s``. Each further pause is twice as long, but at
    most LONGEST_PAUSE_S. ``clock`` returns the time in seconds.
    """

    limit: int
    window_s: float
    clock: Callable[[], float] = time.monotonic
    first_pause_s: float = FIRST_PAUSE_S
    _taken: list[float] = field(default_factory=list, init=False)

    def take(self) -> float | None:
        """Use up one restart and return the seconds to wait before it; None where the window has none left."""
        current_time = self.clock()
        self._taken = [taken for taken in self._taken if taken > current_time - self.window_s]
        if len(self._taken) >= self.limit:
            return None
        pause = self.pause(len(self._taken))
        self._taken.append(current_time)
        return pause

    @property
    def taken(self) -> int:
        """Restarts in the window, at the time of the last ``take``."""
        return len(self._taken)

    def pause(self, earlier_restarts: int) -> float:
        return min(self.first_pause_s * 2.0 ** min(earlier_restarts, 30), LONGEST_PAUSE_S)


class EngineGivenUpError(RunError):
    """The engine failed for good; the message holds the end of its log."""


class FirstStartError(EngineGivenUpError):
    """A server did not come up the first time: it is given up, unless :meth:`SupervisedServer.retry` follows."""


@dataclass(frozen=True)
class _Starting:
    healthy: Future[float]


@dataclass(frozen=True)
class _Published:
    server: Server


@dataclass(frozen=True)
class _Waiting:
    """No process runs; the next one starts at ``due``, by the budget's clock."""

    due: float


@dataclass(frozen=True)
class _Failed:
    """The first start failed; the fleet decides whether to retry."""

    error: FirstStartError


@dataclass(frozen=True)
class _PortWait:
    """The time since which another process has had the server's port, and the number of starts that failed for it."""

    since: float
    starts: int


def _always(name: str) -> bool:
    return True


@dataclass(eq=False)
class SupervisedServer:
    """One server of a run, or its HTTP router, through its incarnations 1, 2, ...; docs/fleet.md draws its states.

    All methods are called from the main thread.

    Args:
        name: name under which the server is published in ``record``.
        title: name in messages.
        make_process: makes the process of an incarnation, not started.
        budget: limits number and pace of restarts. A start that failed because another process has its port uses no
            restart: the server waits for the port.
        may_start: returns whether the server of a name may use its devices, to start or to continue its start.
    """

    name: str
    make_process: Callable[[int], ChildServer]
    record: FleetRecord
    _: KW_ONLY
    budget: RestartBudget
    title: str = "the engine"
    may_start: Callable[[str], bool] = _always
    incarnation: int = field(default=0, init=False)
    _process: ChildServer | None = field(default=None, init=False)
    _state: _Starting | _Published | _Waiting | _Failed | None = field(default=None, init=False)
    _port_wait: _PortWait | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # The thread only waits. A process dies with the thread that started it, which must be the main one.
        self._waiter = ThreadPoolExecutor(1, f"start-{self.name}")

    @property
    def is_published(self) -> bool:
        return isinstance(self._state, _Published)

    @property
    def first_failure(self) -> FirstStartError | None:
        """The error of the first start, until ``retry``."""
        if isinstance(self._state, _Failed):
            return self._state.error
        return None

    def start(self) -> None:
        """Start the next incarnation, as soon as ``may_start`` allows, and return at once; :meth:`check` publishes
        it.
        """
        if not self.may_start(self.name):
            self._state = _Waiting(self.budget.clock())
            return
        self.incarnation += 1
        self._process = process = self.make_process(self.incarnation)
        try:
            process.start()
        except RunError as error:
            healthy: Future[float] = Future()
            healthy.set_exception(error)
        else:
            healthy = self._waiter.submit(process.wait_healthy, _Progress(self.title))
        self._state = _Starting(healthy)

    def check(self) -> None:
        """Publish a server that became healthy; restart one that died or was reported lost.

        Raises EngineGivenUpError when the restarts are used up. After a first start that failed, nothing happens until
        :meth:`retry`.
        """
        match self._state:
            case _Waiting(due):
                if self.budget.clock() >= due:
                    self.start()
            case _Starting() if not self.may_start(self.name):
                log.info("%s starts later: its devices are needed", self.title)
                self._end()
                self._state = _Waiting(self.budget.clock())
            case _Starting(healthy):
                if healthy.done():
                    try:
                        self._started(healthy)
                    finally:
                        self.record.end_start(self.name)
            case _Published():
                self._check_published()

    def free_devices(self) -> None:
        """End a server that starts or was reported lost, and do not start it again: the run is stopping."""
        is_lost = self.record.take_report(self.name) == self.incarnation
        if isinstance(self._state, _Starting) or (self.is_published and is_lost):
            self._end()

    def retry(self) -> None:
        """Start again after a first start that failed. Raises EngineGivenUpError as :meth:`check`."""
        self._restart(str(self.first_failure))

    def stop(self, *, at_once: bool) -> None:
        """End the server, by force where ``at_once``, and withdraw it."""
        # A server that is starting has no request to finish.
        at_once = at_once or isinstance(self._state, _Starting)
        self._withdraw()
        if self._process is not None:
            if at_once:
                self._process.kill()
            else:
                self._process.stop()
        self._waiter.shutdown()

    def _started(self, healthy: Future[float]) -> None:
        assert self._process is not None
        process = self._process
        error = healthy.exception()
        if error is None:
            server = Server(self.name, process.url, self.incarnation, process.pid)
            self._port_wait = None
            self.record.publish(server)
            self._state = _Published(server)
            log.info("%s ready after %.0f s at %s", self.title, healthy.result(), process.url)
        # Raise a fault in the code: restarts would only hide it.
        elif not isinstance(error, RunError):
            raise error
        elif isinstance(error, PortHeldError):
            self._wait_for_port(error)
        elif self.incarnation == 1:
            # The configuration may be at fault: only the fleet sees whether another server starts with it.
            self._state = _Failed(FirstStartError(f"{self.title} did not start: {error}"))
        else:
            self._restart(f"{self.title} did not start again: {error}")

    def _check_published(self) -> None:
        assert self._process is not None
        # A hung process keeps running, so only its clients notice. A report on an earlier incarnation comes too late.
        is_reported = self.record.take_report(self.name) == self.incarnation
        if is_reported and self._process.poll() is None:
            # Connections break a moment before the process can be waited for, and an exit code tells more than a
            # report.
            time.sleep(_DYING_S)
        code = self._process.poll()
        if code is None and not is_reported:
            return
        exception = self._process.last_exception()
        if code is not None:
            end = describe_exit(code, exception)
        else:
            end = "runs but was reported lost by the trainer"
            end += f" after {exception}" if exception else ""
        tail = quote(self._process.log_tail(_RESTART_TAIL_LINES))
        self._restart(f"{self.title} {end}; the end of its log:\n{tail}")

    def _restart(self, reason: str) -> None:
        self._end()
        budget = self.budget
        pause = budget.take()
        if pause is None:
            raise EngineGivenUpError(
                f"{reason}\ngiving up after {budget.limit} restarts within {budget.window_s:.0f} s "
                "(engine.max_restarts, engine.restart_window_s)"
            )
        log.warning("%s\nrestart %d of %d in %.0f s", reason, budget.taken, budget.limit, pause)
        self._state = _Waiting(budget.clock() + pause)

    def _wait_for_port(self, error: PortHeldError) -> None:
        """Try again soon: the process that has the port may be about to end."""
        current_time = self.budget.clock()
        wait = self._port_wait or _PortWait(current_time, 0)
        if current_time > wait.since + _PORT_PATIENCE_S:
            raise EngineGivenUpError(
                f"{self.title} did not start in {current_time - wait.since:.0f} s: {error}"
            )
        if not wait.starts:
            log.warning("%s waits for its port: %s", self.title, error)
        self._port_wait = _PortWait(wait.since, wait.starts + 1)
        self._state = _Waiting(current_time + self.budget.pause(wait.starts))

    def _end(self) -> None:
        """Forget the process after it has ended; only then is it not published and not starting."""
        assert self._process is not None
        self._process.kill()
        self._withdraw()
        self.record.end_start(self.name)

    def _withdraw(self) -> None:
        if isinstance(self._state, _Published):
            self.record.withdraw(self._state.server)
        self._state = None


class _Progress:
    """Logs once a minute how far the start of a server is; called from the thread that waits for it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = _PROGRESS_S

    def __call__(self, seconds: float, stage: str) -> None:
        if seconds >= self._next:
            self._next = seconds + _PROGRESS_S
            log.info("%s is starting, %.0f s: %s", self._title, seconds, stage)


class SupervisedFleet:
    """The servers of a run and its HTTP router, supervised together.

    All methods are called from the main thread.

    Args:
        servers: may be empty where other servers run elsewhere.
        router: None where the run has none.
        record: registry in which the processes are published.
        keys: keys that clients of these processes must send; no file has them. The admin key opens the endpoint.
        host: address on which the endpoint offers the registry to ranks and commands.
    """

    def __init__(
        self,
        servers: Sequence[SupervisedServer],
        router: SupervisedServer | None,
        record: FleetRecord,
        keys: Keys,
        host: str,
    ) -> None:
        assert keys.admin is not None
        self.record = record
        self.keys = keys
        self._servers = list(servers)
        self._router = router
        self._everything = [*servers, *([] if router is None else [router])]
        self._endpoint = FleetEndpoint(record, keys.admin, host)
        self._proven = False

    @property
    def rank_variables(self) -> dict[str, str]:
        return {**self.keys.to_variables(), **self._endpoint.variables}

    def start(self) -> None:
        self._endpoint.start()
        for server in self._everything:
            server.start()

    def check(self) -> None:
        """Publish servers that became healthy, and restart those that died.

        A server whose first start failed is restarted once another server of the same configuration has started. Where
        none does, all are given up at once, because the configuration is at fault.

        Raises EngineGivenUpError when the last server is given up and none is attached.
        """
        # Copy the list: a server that is given up is removed from it.
        for server in list(self._servers):
            self._take_step(server, server.check)
        self._decide_first_failures()
        if self._router is not None:
            try:
                self._router.check()
                if self._router.first_failure is not None:
                    raise self._router.first_failure
            except EngineGivenUpError as error:
                log.error("%s\ngoing on without a router", error)
                self._router = None

    def free_devices(self) -> None:
        """Free the devices of servers that start or are lost: the run is stopping, and the trainer may need them."""
        for server in self._servers:
            server.free_devices()

    def stop(self, *, at_once: bool) -> None:
        """End all servers at the same time, including those that were given up."""
        with ThreadPoolExecutor(max(1, len(self._everything)), "stop") as pool:
            for end in [pool.submit(s.stop, at_once=at_once) for s in self._everything]:
                end.result()
        self._endpoint.stop()

    def _take_step(self, server: SupervisedServer, step: Callable[[], None]) -> None:
        try:
            step()
        except EngineGivenUpError as error:
            self._give_up(server, error)
        self._proven = self._proven or server.is_published

    def _decide_first_failures(self) -> None:
        failed = [(s, error) for s in self._servers if (error := s.first_failure) is not None]
        if not self._proven and len(failed) < len(self._servers):
            return
        for server, error in failed:
            if self._proven:
                self._take_step(server, server.retry)
            else:
                self._give_up(server, error)

    def _give_up(self, server: SupervisedServer, error: EngineGivenUpError) -> None:
        self._servers.remove(server)
        attached = [s for s in self.record.servers() if not s.replaceable]
        if not self._servers and not attached:
            raise error
        remaining_count = len(self._servers) + len(attached)
        log.error("%s\ngoing on with the other servers, %d", error, remaining_count)
