"""A supervised server with a small real process: how often it is restarted, how soon, and which starts do not
count."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.fleet.supervision import EngineGivenUpError, RestartBudget, SupervisedServer
from megatron_dppo.system.ports import free_port
from tests.messages import mentioning, mentions
from tests.patience import Clock, happens
from tests.unit.test_engine_child_server import SmallServer


def test_each_restart_in_a_window_comes_later_and_their_number_is_bounded():
    clock = Clock()
    budget = RestartBudget(8, 100.0, clock=clock)
    assert [budget.take() for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]


def test_restarts_before_the_window_are_forgotten():
    clock = Clock()
    budget = RestartBudget(2, 100.0, clock=clock)
    assert budget.take() == 1  # at 0 s
    clock.now += 60
    assert budget.take() == 2  # at 60 s
    clock.now += 39
    assert budget.take() is None  # 99 s: both are in the window
    clock.now += 1
    assert budget.take() == 2  # 100 s: the first is out of the window
    assert budget.taken == 2
    clock.now += 100
    assert budget.take() == 1


def test_none_are_allowed():
    assert RestartBudget(0, 100.0).take() is None


class SupervisedSmallServer:
    """A supervised SmallServer on one port, with its own clock. ``processes``: all that were started."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.port = free_port()
        self.clock = Clock()
        self.record = FleetRecord(directory)
        self.processes: list[SmallServer] = []
        self._log = directory / "small.log"
        self.budget = RestartBudget(limit, 100.0, clock=self.clock)
        self.server = SupervisedServer(
            "engine0",
            self._make,
            self.record,
            budget=self.budget,
            may_start=self.record.begin_start,
        )

    def _make(self, incarnation: int) -> SmallServer:
        server = SmallServer(self._log)
        server.set_port(self.port)
        self.processes.append(server)
        return server

    def check_until(self, condition: Callable[[], object]) -> None:
        """Call the supervisor's check until the condition is true. The clock stands still."""

        def is_met_after_a_check() -> object:
            self.server.check()
            return condition()

        assert condition() or happens(is_met_after_a_check)

    def check_until_healthy(self) -> None:
        self.check_until(self.record.servers)

    def kill_process(self) -> None:
        self.processes[-1].kill()
        self.check_until(lambda: not self.record.servers())


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[[int], SupervisedSmallServer]]:
    """A function that starts a supervised server. Its argument is the limit of restarts."""
    all_engines: list[SupervisedSmallServer] = []

    def start_one(limit: int) -> SupervisedSmallServer:
        engine = SupervisedSmallServer(tmp_path, limit)
        all_engines.append(engine)
        engine.server.start()
        engine.check_until_healthy()
        return engine

    yield start_one
    for engine in all_engines:
        engine.server.stop(at_once=True)


def test_a_dead_server_is_named_by_its_last_exception(supervise, caplog):
    engine = supervise(2)
    with (engine.processes[-1].log_path).open("a") as log:
        log.write("Traceback (most recent call last):\n  File a\nIndexError: out of range\n")
        log.write("a line of another process\n" * 20)
    engine.kill_process()
    assert mentions(caplog.text, "IndexError: out of range")
    assert "memory" not in caplog.text


def test_a_dead_server_is_started_again_when_its_pause_is_over(supervise, caplog):
    engine = supervise(2)
    engine.kill_process()
    assert mentions(caplog.text, "restart 1 of 2", "1 s")
    engine.clock.now += 0.9
    engine.server.check()
    assert len(engine.processes) == 1
    engine.clock.now += 0.1
    engine.check_until_healthy()
    assert engine.record.servers()[0].incarnation == 2


def test_a_record_that_cannot_be_written_ends_no_server(supervise, caplog):
    engine = supervise(2)
    file = engine.record.path / "fleet.json"
    file.unlink()
    file.mkdir()
    engine.kill_process()
    engine.clock.now += 1
    engine.check_until_healthy()
    assert engine.record.servers()[0].incarnation == 2
    assert "fleet.json is not up to date: " in caplog.text


@contextmanager
def held_port(port: int) -> Iterator[None]:
    """Listen on ``port`` within the block, as another program."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        yield


def test_a_port_that_is_held_is_waited_for_and_costs_no_restart(supervise, caplog):
    engine = supervise(1)
    engine.kill_process()
    with held_port(engine.port):
        for _ in range(7):  # tries at 1, 2, 4, 8, ... s
            engine.clock.now += 1
            engine.server.check()
            engine.server.check()
    assert len(engine.processes) == 1 + 3
    lines = [r.getMessage() for r in caplog.records if "waits for its port" in r.getMessage()]
    assert len(lines) == 1
    assert f"cannot bind 127.0.0.1:{engine.port}" in lines[0]
    assert "\n" not in lines[0]
    engine.clock.now += 10
    engine.check_until_healthy()
    assert engine.budget.taken == 1


def test_a_port_that_stays_held_ends_it_in_one_line(supervise):
    engine = supervise(1)
    engine.kill_process()
    with held_port(engine.port):
        for _ in range(63):  # tries at 1, 2, 4, 8, 16, 32 s
            engine.clock.now += 1
            engine.server.check()
            engine.server.check()
        assert len(engine.processes) == 1 + 6
        engine.clock.now += 1  # 64 s: 63 s after the port was first in use
        engine.server.check()
        with pytest.raises(EngineGivenUpError, match=mentioning("63 s", "small.port")) as error:
            engine.server.check()
    assert "\n" not in str(error.value)


def test_no_server_starts_on_devices_that_the_trainer_has(supervise):
    engine = supervise(2)
    engine.record.allow_starts(False)
    engine.kill_process()
    engine.clock.now += 50
    for _ in range(3):
        engine.server.check()
    assert len(engine.processes) == 1
    engine.record.allow_starts(True)
    engine.check_until_healthy()
    assert engine.record.servers()[0].incarnation == 2


def test_a_server_that_starts_leaves_devices_that_the_trainer_takes_and_it_costs_no_restart(
    supervise,
):
    engine = supervise(2)
    engine.kill_process()
    engine.clock.now += 1
    engine.check_until(lambda: len(engine.processes) == 2)
    assert engine.record.starting() == ["engine0"]
    engine.record.allow_starts(False)
    engine.server.check()
    assert engine.processes[1].poll() is not None
    assert engine.record.starting() == engine.record.servers() == []
    engine.server.check()
    assert len(engine.processes) == 2
    engine.record.allow_starts(True)
    engine.check_until_healthy()
    assert engine.record.starting() == []
    assert engine.record.servers()[0].incarnation == 3
    assert engine.budget.taken == 1


def test_a_lost_server_is_published_until_its_process_is_gone(supervise, monkeypatch):
    """A server that is neither published nor starting must be on no device."""
    engine = supervise(2)
    kill, published = engine.processes[0].kill, []

    def spy() -> None:
        kill()
        published.append(engine.record.servers())

    monkeypatch.setattr(engine.processes[0], "kill", spy)
    engine.record.report_lost("engine0", 1)
    engine.server.check()
    assert [server.name for server in published[0]] == ["engine0"]
    assert engine.record.servers() == []


def test_a_run_that_stops_ends_what_starts_or_is_lost_and_starts_nothing(supervise):
    engine = supervise(2)
    engine.server.free_devices()
    assert engine.processes[0].poll() is None
    engine.record.report_lost("engine0", 1)
    engine.server.free_devices()
    assert engine.processes[0].poll() is not None
    assert engine.record.servers() == []
    engine.server.start()
    engine.server.free_devices()
    assert engine.processes[1].poll() is not None
    engine.clock.now += 50
    engine.server.check()
    assert len(engine.processes) == 2
    assert engine.record.starting() == []


def test_the_first_start_too_waits_for_the_devices(tmp_path):
    engine = SupervisedSmallServer(tmp_path, 0)
    engine.record.allow_starts(False)
    engine.server.start()
    engine.server.check()
    assert not engine.processes
    engine.record.allow_starts(True)
    engine.check_until_healthy()
    engine.server.stop(at_once=True)
    assert engine.server.incarnation == 1
