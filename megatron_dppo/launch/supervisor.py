"""One run's servers with their HTTP router, each where the placement has it, and its ranks, from start to end, and
nothing left behind.

A rank's error ends the run, and so does another start that took it over. A dead server is started
again. A stop that is asked for (Ctrl-C, a signal, a time limit) has the ranks end their step and save a
checkpoint; a second one ends everything at once. When the servers are given up, the ranks, which are in
order, are asked to stop cleanly too: the run fails after a checkpoint.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from megatron_dppo.engine.options import ServerHosts, ServerSections
from megatron_dppo.engine.process import ChildServer, EngineProcess, Runtime
from megatron_dppo.fleet.endpoint import admin_key, control_host
from megatron_dppo.fleet.http_router import OPEN_PATHS, HttpRouterProcess
from megatron_dppo.fleet.record import API_KEY_VARIABLE, ROUTER, Keys
from megatron_dppo.fleet.supervision import (
    EngineGivenUpError,
    RestartBudget,
    SupervisedFleet,
    SupervisedServer,
)
from megatron_dppo.launch.placement import Host, LaunchError, Placement, RouterPlace, ServerPlace
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import failure_mark, say
from megatron_dppo.system import processes
from megatron_dppo.system.network import InterfaceError, free_port, is_loopback

# --- how servers and router are started

_SEEDS_PER_START = 10_007
_SEEDS_PER_SERVER = 1_000_003


@dataclass(frozen=True)
class Grounds:
    """How servers are started: ``runtime_at`` a host, or over several. ``address``: where this process listens for
    the ranks. ``host_now``: the host to start on again instead of one that may have died."""

    runtime_at: Callable[[Sequence[Host]], Runtime]
    address: str
    host_now: Callable[[Host], Host] = lambda host: host


@dataclass(frozen=True)
class _Maker:
    sections: ServerSections
    directory: RunDirectory
    keys: Keys
    seed: int
    grounds: Grounds

    def server(self, server: ServerPlace, incarnation: int) -> ChildServer:
        assert self.keys.admin is not None
        hosts = server.hosts
        if incarnation > 1:
            hosts = tuple(self.grounds.host_now(host) for host in hosts)
        several = None
        if server.meeting_port is not None:
            port = self._port(server.meeting_port, server.port_step, incarnation)
            several = ServerHosts({host.name: host.address for host in hosts}, port)
        return EngineProcess(
            self.sections,
            port=self._port(server.port, server.port_step, incarnation),
            log_path=self.directory.server_log(server.name, incarnation),
            seed=self.seed + server.index * _SEEDS_PER_SERVER + incarnation - 1,
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=hosts[0].address,
            first_device=server.first_device,
            hosts=several,
            runtime=self.grounds.runtime_at(hosts),
        )

    def router(self, router: RouterPlace, incarnation: int) -> ChildServer:
        assert self.keys.api is not None
        assert self.keys.admin is not None
        if incarnation == 1 and not is_loopback(router.host.address):
            say(
                f"the router at {router.host.address} answers without a key: {', '.join(OPEN_PATHS)}"
            )
        return HttpRouterProcess(
            self.sections.engine,
            port=self._port(router.port, router.port_step, incarnation),
            metrics_port=self._port(router.metrics_port, router.port_step, incarnation),
            log_path=self.directory.server_log(ROUTER, incarnation),
            api_key=self.keys.api,
            admin_api_key=self.keys.admin,
            host=router.host.address,
            runtime=self.grounds.runtime_at([router.host]),
        )

    def _port(self, first: int | None, step: int, incarnation: int) -> int:
        if first is None:
            return free_port(self.sections.engine.host)
        return first + step * (incarnation - 1)


def supervised_fleet(
    sections: ServerSections,
    directory: RunDirectory,
    placement: Placement,
    grounds: Grounds,
    *,
    seed: int,
    interface: str | None,
) -> SupervisedFleet:
    """The run's servers and HTTP router, not started, under new keys, but for those that the
    environment has. The record of them is offered to the ranks by this process, on ``interface``."""
    engine = sections.engine
    # The router hands its client's key on, so the servers of a fleet take the same one.
    api_key = os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)
    keys = Keys(api_key, admin_key())
    # A resumed run, or a restarted server, must not draw the samples of its beginning once more.
    seed += _SEEDS_PER_START * directory.count_start()
    maker = _Maker(sections, directory, keys, seed, grounds)

    def supervised(
        name: str, make: Callable[[int], ChildServer], title: str, **gate: Callable[[str], bool]
    ) -> SupervisedServer:
        budget = RestartBudget(engine.max_restarts, engine.restart_window_s)
        return SupervisedServer(name, make, directory.fleet, budget=budget, title=title, **gate)

    # A colocated trainer says when it has left the devices.
    directory.fleet.allow_starts(engine.placement == "separate")
    servers = [
        supervised(
            server.name,
            partial(maker.server, server),
            "the engine" if engine.started == 1 else server.name,
            may_start=directory.fleet.begin_start,
        )
        for server in placement.servers
    ]
    router = None
    if placement.router is not None:
        router = supervised(ROUTER, partial(maker.router, placement.router), "the router")
    try:
        host = control_host(interface, grounds.address)
        return SupervisedFleet(servers, router, directory.fleet, keys, host)
    except (InterfaceError, OSError) as error:
        raise LaunchError(f"parallel.interface: the supervisor can't listen: {error}") from error


# --- what asks a supervisor to end its run: signals, and a clock


@dataclass(frozen=True)
class Stop:
    """A reason to end a run cleanly, with the run's exit code. ``insists``: it ends a run at once that is stopping
    already."""

    why: str
    code: int
    insists: bool = False


TIME = Stop("time", 0)
"""The time limit is near."""
OVERTIME = Stop("overtime", 1, insists=True)
"""The time limit is near, and the ranks have not ended their step."""


@dataclass(eq=False)
class StopRequests:
    """The stops that came, in order. ``with listening()`` takes signals; ``deadlines``: epoch seconds at which a stop
    comes by itself."""

    signals: Mapping[int, Stop]
    deadlines: Mapping[Stop, float] = field(default_factory=dict)
    now: Callable[[], float] = time.time
    _came: list[Stop] = field(default_factory=list, init=False)

    def move_deadlines(self, deadlines: Mapping[Stop, float]) -> None:
        """Have the stops that did not come yet come at other times; from any thread."""
        self.deadlines = deadlines

    def came(self) -> list[Stop]:
        """Those that came, repetitions of one that does not insist left out."""
        for stop, deadline in self.deadlines.items():
            if stop not in self._came and self.now() >= deadline:
                self._came.append(stop)
        return self._came

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals; call it in the main thread."""
        previous = {number: signal.signal(number, self._note) for number in self.signals}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two instructions of the main thread: it only takes note, the loop acts.
        stop = self.signals[number]
        if stop.insists or stop not in self._came:
            self._came.append(stop)


def terminal_stops() -> StopRequests:
    """Of a run that a user started: Ctrl-C, SIGTERM and SIGHUP, each with a shell's exit code."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return StopRequests({n: Stop("interrupted", 128 + n, insists=True) for n in numbers})


# --- the trainer's processes: started together, watched together, ended together


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error; None: one that nobody can name. ``failed_at``: when, in epoch seconds."""

    rank: int | None
    code: int
    output: Path
    failed_at: float

    def report(self) -> str:
        who = "the ranks' step" if self.rank is None else f"rank {self.rank}"
        return (
            f"{who} {processes.describe_exit(self.code)}; the end of {self.output}:\n"
            f"{processes.quote(processes.tail(self.output))}"
        )

    @property
    def stopped_early(self) -> bool:
        """Whether it ended by the request to stop, which it did not handle yet."""
        return self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)


class Ranks(Protocol):
    """All ranks of a run, wherever they are."""

    def start(self) -> None:
        """Start every rank; call from the main thread."""

    def ended(self) -> bool:
        """Whether all have ended without an error."""

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Ranks that ended with an error, the likely cause first; empty while there is none.

        Others that fail because of it have ``grace_s`` seconds to do so.
        """

    def ask_to_stop(self) -> None:
        """Ask each to end its step and save a checkpoint."""

    def kill(self) -> None:
        """End ranks and their descendants by force; returns when they are gone."""


def keep_previous(path: Path) -> None:
    """Give the output of an earlier start another name, and forget its failure."""
    failure_mark(path).unlink(missing_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".previous.out"))


def failed_at(path: Path) -> float:
    """When the rank with this output failed, in epoch seconds, by its own word; else, as for one that
    was killed, when it last wrote something; 0 where it never did."""
    try:
        return float(failure_mark(path).read_text())
    except (OSError, ValueError):
        pass
    return path.stat().st_mtime if path.exists() else 0.0


log = logging.getLogger(__name__)

FAILED = 1
_POLL_S = 0.05
_FAILURE_GRACE_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``code``: 0 at its end, the stop's after a stop that was asked for, 1 for a failure.

    ``succeeded``: another start took the run over; ``refused``: nothing was started. ``detail``: of a failure,
    for people; why a stop came, in a word.
    """

    code: int
    ending: Literal["ended", "stopped", "failed", "succeeded", "refused"]
    detail: str = ""


@dataclass(eq=False)
class Supervisor:
    """Runs servers (or none) and ranks until they end. Owns the process's signals and all of its descendants.

    ``taken_over``: says who took the run over, None while nobody did. ``stops``: by default Ctrl-C, SIGTERM and SIGHUP.
    """

    ranks: Ranks
    fleet: SupervisedFleet | None
    taken_over: Callable[[], str | None] = lambda: None
    stops: StopRequests = field(default_factory=terminal_stops)
    _handled: list[Stop] = field(default_factory=list, init=False)
    _given_up: str = field(default="", init=False)

    def run(self) -> Outcome:
        # Whatever ranks and servers start, and leave behind, is then a child of this process, and ends with it.
        processes.adopt_orphans()
        outcome = Outcome(FAILED, "failed", "the supervisor failed")
        with self.stops.listening():
            try:
                if self.fleet is not None:
                    self.fleet.start()
                self.ranks.start()
                outcome = self._watch()
            finally:
                # After a failure, or a second stop, nobody needs what the servers still generate.
                self._end(at_once=outcome.code == FAILED or len(self._handled) > 1)
        return outcome

    def _watch(self) -> Outcome:
        while True:
            # Before the failures: ranks of a start that was succeeded are fenced, which looks like one.
            if (successor := self.taken_over()) is not None:
                log.error("%s", successor)
                return Outcome(FAILED, "succeeded", successor)
            failures = self.ranks.failures(_FAILURE_GRACE_S)
            if failures:
                return self._on_failure(failures)
            if self.ranks.ended():
                return self._stopped() if self._is_stopping else Outcome(0, "ended")
            if self._must_end_at_once():
                log.warning("ending at once; the run resumes from its last checkpoint")
                return self._stopped()
            if self.fleet is not None and self._is_stopping:
                self.fleet.free_devices()
            elif self.fleet is not None:
                self._check(self.fleet)
            time.sleep(_POLL_S)

    @property
    def _is_stopping(self) -> bool:
        return bool(self._handled or self._given_up)

    def _check(self, fleet: SupervisedFleet) -> None:
        try:
            fleet.check()
        except EngineGivenUpError as error:
            self._given_up = str(error)
            log.error("%s", error)
            log.info("no server is left: the trainer ends its step and saves a checkpoint")
            self.ranks.ask_to_stop()

    def _must_end_at_once(self) -> bool:
        """Take the next stop that came; whether it leaves no time for a clean end."""
        came = self.stops.came()
        if len(came) == len(self._handled):
            return False
        stop = came[len(self._handled)]
        was_stopping = self._is_stopping
        self._handled.append(stop)
        if was_stopping:
            return stop.insists
        log.info(
            "stopping: the trainer ends its step and saves a checkpoint%s",
            "; again to end at once" if stop.insists else f" ({stop.why})",
        )
        self.ranks.ask_to_stop()
        return False

    def _stopped(self) -> Outcome:
        if self._given_up:
            return Outcome(FAILED, "failed", self._given_up)
        last = self._handled[-1] if self._handled[-1].insists else self._handled[0]
        return Outcome(self._handled[0].code or last.code, "stopped", last.why)

    def _on_failure(self, failures: list[RankFailure]) -> Outcome:
        if self._is_stopping and all(failure.stopped_early for failure in failures):
            log.info("stopped before the training began; there was nothing to save")
            return self._stopped()
        first, *others = failures
        # Completes the files that the report quotes.
        self.ranks.kill()
        report = first.report()
        log.error("%s", report)
        for other in others:
            log.error("after it, rank %d failed too: see %s", other.rank, other.output)
        return Outcome(FAILED, "failed", report)

    def _end(self, *, at_once: bool) -> None:
        self.ranks.kill()
        if self.fleet is not None:
            self.fleet.stop(at_once=at_once)
        left = processes.kill_descendants()
        if left:
            log.error("processes %s do not end; the kernel holds them", left)
