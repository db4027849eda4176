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
"""Shortest and longest pause before a restart."""
_PROGRESS_S = 60.0
"""Seconds between two messages about a server that is starting."""
_RESTART_TAIL_LINES = 10
"""Lines of a server's log in the message about its restart."""
_PORT_PATIENCE_S = 60.0
"""Longest time to wait for a port that another process has."""
_DYING_S = 0.1
"""Time to wait for the exit code of a server that was reported lost: its connections break some milliseconds before the
process has ended."""


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
    _restart_times: list[float] = field(default_factory=list, init=False)

    def take(self) -> float | None:
        """Use up one restart and return the seconds to wait before it; None if the window has no restart left."""
        current_time = self.clock()
        window_start = current_time - self.window_s
        self._restart_times = [time_s for time_s in self._restart_times if time_s > window_start]
        if len(self._restart_times) >= self.limit:
            return None
        pause = self.pause(len(self._restart_times))
        self._restart_times.append(current_time)
        return pause

    @property
    def taken(self) -> int:
        """Number of restarts in the window, at the time of the last ``take``."""
        return len(self._restart_times)

    def pause(self, earlier_restarts: int) -> float:
        """Return the pause before a restart after ``earlier_restarts`` in the window."""
        # Bound the exponent, because a float overflows at 2**1024.
        return min(self.first_pause_s * 2.0 ** min(earlier_restarts, 30), LONGEST_PAUSE_S)


class EngineGivenUpError(RunError):
    """A server has no restart left; the message holds the end of its log."""


class FirstStartError(EngineGivenUpError):
    """The first start of a server failed: the server is given up, unless :meth:`SupervisedServer.retry` follows."""


@dataclass(frozen=True)
class _Starting:
    """A process runs and is not healthy yet. ``start_seconds`` is done when the process is healthy, or has failed."""

    start_seconds: Future[float]


@dataclass(frozen=True)
class _Published:
    """The process became healthy, and ``server`` is in the registry."""

    server: Server


@dataclass(frozen=True)
class _Waiting:
    """No process runs. The next process starts at the time ``due`` of the budget's clock."""

    due: float


@dataclass(frozen=True)
class _Failed:
    """The first start failed; ``SupervisedFleet`` decides whether to retry."""

    error: FirstStartError


@dataclass(frozen=True)
class _PortWait:
    """Another process has had the server's port since the time ``since``. ``failed_starts`` is the number of starts
    that failed because of the port."""

    since: float
    failed_starts: int


def _always(name: str) -> bool:
    return True


@dataclass(eq=False)
class SupervisedServer:
    """One server of a run, or its HTTP router, through its incarnations 1, 2, ...

    States::

        start() ----> starting --------- healthy ---------> published
                       |  ^  |                                  |
                       |  |  |  a first start failed            |  exits, or is reported lost
                       |  |  +----------> failed                |
                       |  |                 |  retry(): another |
                       |  |                 |  server started   |
          port held,   |  | the pause       v                   v
          a later      +--|-- is over --> waiting <-------------+
          start failed,   +-----------------+
          devices needed

    A server is given up, and no longer checked, if no restart is left, if its port stays held for a minute, or if no
    server has started at all. All methods are called from the main thread.

    Args:
        name: name under which the server is published in ``record``.
        title: name in messages.
        teacher: name of the teacher that the server serves; empty: it serves the policy, or is the router.
        make_process: makes the process of an incarnation, without starting it.
        budget: limits number and pace of restarts. If a start fails because another process has the server's port, the
            server waits for the port, and no restart is used up.
        may_start: returns whether the server with this name may use its devices, to start or to continue its start.
    """

    name: str
    make_process: Callable[[int], ChildServer]
    record: FleetRecord
    _: KW_ONLY
    budget: RestartBudget
    title: str = "the engine"
    teacher: str = ""
    may_start: Callable[[str], bool] = _always
    incarnation: int = field(default=0, init=False)
    _process: ChildServer | None = field(default=None, init=False)
    _state: _Starting | _Published | _Waiting | _Failed | None = field(default=None, init=False)
    _port_wait: _PortWait | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # This thread only waits for processes. The main thread starts them, because a process dies with the thread that
        # started it.
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
        """Start the next incarnation, as soon as ``may_start`` allows, and return at once. :meth:`check` publishes the
        server when it is healthy.
        """
        if not self.may_start(self.name):
            self._state = _Waiting(self.budget.clock())
            return
        self.incarnation += 1
        process = self.make_process(self.incarnation)
        self._process = process
        try:
            process.start()
        except RunError as error:
            start_seconds: Future[float] = Future()
            start_seconds.set_exception(error)
        else:
            start_seconds = self._waiter.submit(process.wait_healthy, _Progress(self.title))
        self._state = _Starting(start_seconds)

    def check(self) -> None:
        """Publish the server if it became healthy; restart it if it died or was reported lost.

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
            case _Starting(start_seconds):
                if start_seconds.done():
                    try:
                        self._on_start_done(start_seconds)
                    finally:
                        self.record.end_start(self.name)
            case _Published():
                self._check_published()

    def free_devices(self) -> None:
        """End the server if it is starting or was reported lost, and do not start it again: the run is stopping."""
        is_lost = self.record.take_report(self.name) == self.incarnation
        if isinstance(self._state, _Starting) or (self.is_published and is_lost):
            self._end()

    def retry(self) -> None:
        """Start again after a first start that failed. Raises EngineGivenUpError as :meth:`check`."""
        self._restart(str(self.first_failure))

    def stop(self, *, at_once: bool) -> None:
        """End the server, by force if ``at_once``, and withdraw it."""
        # A server that is starting has no request to finish.
        at_once = at_once or isinstance(self._state, _Starting)
        self._withdraw()
        if self._process is not None:
            if at_once:
                self._process.kill()
            else:
                self._process.stop()
        self._waiter.shutdown()

    def _on_start_done(self, start_seconds: Future[float]) -> None:
        """Publish the server if its start succeeded; otherwise decide on the next start."""
        assert self._process is not None
        process = self._process
        error = start_seconds.exception()
        if error is None:
            server = Server(
                self.name, process.url, self.incarnation, process.pid, teacher=self.teacher
            )
            self._port_wait = None
            self.record.publish(server)
            self._state = _Published(server)
            log.info("%s ready after %.0f s at %s", self.title, start_seconds.result(), process.url)
        elif not isinstance(error, RunError):
            # Any other exception is a fault in the code. Restarts would only hide it.
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
        # A hung process keeps running, so only its clients notice the hang. A report on an earlier incarnation is
        # ignored: that incarnation was replaced already.
        is_reported = self.record.take_report(self.name) == self.incarnation
        if is_reported and self._process.poll() is None:
            # If the process ends within this time, its exit code says more than the report.
            time.sleep(_DYING_S)
        code = self._process.poll()
        if code is None and not is_reported:
            return
        exception = self._process.last_exception()
        if code is not None:
            reason = describe_exit(code, exception)
        elif exception:
            reason = f"runs but was reported lost by the trainer after {exception}"
        else:
            reason = "runs but was reported lost by the trainer"
        tail = quote(self._process.log_tail(_RESTART_TAIL_LINES))
        self._restart(f"{self.title} {reason}; the end of its log:\n{tail}")

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
        """Start again after a pause, because the process that has the port may be about to end."""
        current_time = self.budget.clock()
        wait = self._port_wait or _PortWait(current_time, 0)
        if current_time > wait.since + _PORT_PATIENCE_S:
            raise EngineGivenUpError(
                f"{self.title} did not start in {current_time - wait.since:.0f} s: {error}"
            )
        if not wait.failed_starts:
            log.warning("%s waits for its port: %s", self.title, error)
        self._port_wait = _PortWait(wait.since, wait.failed_starts + 1)
        self._state = _Waiting(current_time + self.budget.pause(wait.failed_starts))

    def _end(self) -> None:
        """Kill the process, and withdraw the server only after the process has ended."""
        assert self._process is not None
        self._process.kill()
        self._withdraw()
        self.record.end_start(self.name)

    def _withdraw(self) -> None:
        if isinstance(self._state, _Published):
            self.record.withdraw(self._state.server)
        self._state = None


class _Progress:
    """Logs once a minute how far the start of a server is; called from the thread that waits for the server."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._next = _PROGRESS_S

    def __call__(self, seconds: float, stage: str) -> None:
        if seconds >= self._next:
            self._next = seconds + _PROGRESS_S
            log.info("%s is starting, %.0f s: %s", self._title, seconds, stage)


class ServerGroup:
    """Servers with one configuration: those of the policy, or those of a teacher.

    If a server's first start failed, it is restarted once another server of the group has started. If the first start
    of every server fails, the configuration is at fault, and all servers are given up. ``count_others``: returns how
    many servers serve the same model that the run has not started.
    """

    def __init__(
        self, servers: Sequence[SupervisedServer], count_others: Callable[[], int]
    ) -> None:
        self.servers = list(servers)
        self._count_others = count_others
        self._has_published_one = False

    def check(self) -> None:
        """Publish servers that became healthy, and restart servers that died.

        Raises EngineGivenUpError when the last server is given up and there are no others.
        """
        # Copy the list: a server that is given up is removed from it.
        for server in list(self.servers):
            self._take_step(server, server.check)
        self._decide_first_failures()

    def _take_step(self, server: SupervisedServer, step: Callable[[], None]) -> None:
        try:
            step()
        except EngineGivenUpError as error:
            self._give_up(server, error)
        if server.is_published:
            self._has_published_one = True

    def _decide_first_failures(self) -> None:
        """If any server was published, restart the servers whose first start failed. If all failed, give all up."""
        failures: list[tuple[SupervisedServer, FirstStartError]] = []
        for server in self.servers:
            if server.first_failure is not None:
                failures.append((server, server.first_failure))
        if not self._has_published_one and len(failures) < len(self.servers):
            # Other servers are still starting.
            return
        for server, error in failures:
            if self._has_published_one:
                self._take_step(server, server.retry)
            else:
                self._give_up(server, error)

    def _give_up(self, server: SupervisedServer, error: EngineGivenUpError) -> None:
        self.servers.remove(server)
        remaining_count = len(self.servers) + self._count_others()
        if not remaining_count:
            raise error
        log.error("%s\ngoing on with the other servers, %d", error, remaining_count)


class SupervisedFleet:
    """The servers of a run, those of its teachers and its HTTP router, supervised together.

    All methods are called from the main thread.

    Args:
        servers: the servers; empty if all servers of the run are attached.
        router: None if the run has no router.
        record: registry that the processes are published in.
        keys: keys that clients of these processes must send; no file has them. The admin key also opens the endpoint.
        host: address of the endpoint that offers the registry to ranks and commands.
        teachers: the servers of each teacher.
    """

    def __init__(
        self,
        servers: Sequence[SupervisedServer],
        router: SupervisedServer | None,
        record: FleetRecord,
        keys: Keys,
        host: str,
        teachers: Sequence[ServerGroup] = (),
    ) -> None:
        assert keys.admin is not None
        self.record = record
        self.keys = keys
        self._policy = ServerGroup(servers, self._count_attached)
        self._groups = [self._policy, *teachers]
        self._router = router
        self._processes: list[SupervisedServer] = []
        for group in self._groups:
            self._processes += group.servers
        if router is not None:
            self._processes.append(router)
        self._endpoint = FleetEndpoint(record, keys.admin, host)

    @property
    def rank_variables(self) -> dict[str, str]:
        return {**self.keys.to_variables(), **self._endpoint.variables}

    def start(self) -> None:
        self._endpoint.start()
        for process in self._processes:
            process.start()

    def check(self) -> None:
        """Publish servers that became healthy, and restart servers that died.

        Raises EngineGivenUpError when the last server of the policy or of a teacher is given up and no server is
        attached for it.
        """
        for group in self._groups:
            group.check()
        if self._router is not None:
            try:
                self._router.check()
                if self._router.first_failure is not None:
                    raise self._router.first_failure
            except EngineGivenUpError as error:
                log.error("%s\ngoing on without a router", error)
                self._router = None

    def free_devices(self) -> None:
        """End servers that start or are lost: the run is stopping, and the trainer may need their devices."""
        for server in self._policy.servers:
            server.free_devices()

    def stop(self, *, at_once: bool) -> None:
        """End all servers at the same time, including servers that were given up."""
        with ThreadPoolExecutor(max(1, len(self._processes)), "stop") as pool:
            stops = [pool.submit(process.stop, at_once=at_once) for process in self._processes]
            for stop in stops:
                stop.result()
        self._endpoint.stop()

    def _count_attached(self) -> int:
        return sum(not server.replaceable for server in self.record.servers())
