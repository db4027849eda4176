"""A supervised server over a small real process: how often it is started again, how soon, and what costs
nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.fleet.supervision import EngineGivenUpError, RestartBudget, SupervisedServer
from megatron_dppo.system.network import free_port
from tests.messages import mentioning, mentions
from tests.patience import happens
from tests.unit.test_engine_child_server import SmallServer


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    assert budget.take() == 2  # 100 s: the first has left it
    assert budget.taken == 2
    clock.now += 100
    assert budget.take() == 1


def test_none_are_allowed():
    assert RestartBudget(0, 100.0).take() is None


class Kept:
    """One supervised SmallServer on one port, under a clock of its own."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.port = free_port()
        self.clock = Clock()
        self.record = FleetRecord(directory)
        self.made: list[SmallServer] = []
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
        self.made.append(server)
        return server

    def until(self, condition: Callable[[], object]) -> None:
        """Check again and again while the clock stands still."""

        def is_met_after_a_check() -> object:
            self.server.check()
            return condition()

        assert condition() or happens(is_met_after_a_check)

    def until_healthy(self) -> None:
        self.until(self.record.servers)

    def die(self) -> None:
        self.made[-1].kill()
        self.until(lambda: not self.record.servers())


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[[int], Kept]]:
    kept: list[Kept] = []

    def keep_one(limit: int) -> Kept:
        kept.append(Kept(tmp_path, limit))
        kept[-1].server.start()
        kept[-1].until_healthy()
        return kept[-1]

    yield keep_one
    for one in kept:
        one.server.stop(at_once=True)


def test_a_dead_server_is_named_by_its_last_exception(keep, caplog):
    kept = keep(2)
    with (kept.made[-1].log_path).open("a") as log:
        log.write("Traceback (most recent call last):\n  File a\nIndexError: out of range\n")
        log.write("a line of another process\n" * 20)
    kept.die()
    assert mentions(caplog.text, "IndexError: out of range")
    assert "memory" not in caplog.text


def test_a_dead_server_is_started_again_when_its_pause_is_over(keep, caplog):
    kept = keep(2)
    kept.die()
    assert mentions(caplog.text, "restart 1 of 2", "1 s")
    kept.clock.now += 0.9
    kept.server.check()
    assert len(kept.made) == 1
    kept.clock.now += 0.1
    kept.until_healthy()
    assert kept.record.servers()[0].incarnation == 2


def test_a_record_that_cannot_be_written_ends_no_server(keep, caplog):
    kept = keep(2)
    file = kept.record.path / "fleet.json"
    file.unlink()
    file.mkdir()
    kept.die()
    kept.clock.now += 1
    kept.until_healthy()
    assert kept.record.servers()[0].incarnation == 2
    assert "fleet.json is not up to date: " in caplog.text


def test_a_port_that_is_held_is_waited_for_and_costs_no_restart(keep, caplog):
    kept = keep(1)
    kept.die()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", kept.port))
        held.listen()
        for _ in range(7):  # tries at 1, 2, 4, 8, ... s
            kept.clock.now += 1
            kept.server.check()
            kept.server.check()
    assert len(kept.made) == 1 + 3
    lines = [r.getMessage() for r in caplog.records if "waits for its port" in r.getMessage()]
    assert len(lines) == 1
    assert f"cannot bind 127.0.0.1:{kept.port}" in lines[0]
    assert "\n" not in lines[0]
    kept.clock.now += 10
    kept.until_healthy()
    assert kept.budget.taken == 1


def test_a_port_that_stays_held_ends_it_in_one_line(keep):
    kept = keep(1)
    kept.die()
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", kept.port))
        held.listen()
        for _ in range(63):  # tries at 1, 2, 4, 8, 16, 32 s
            kept.clock.now += 1
            kept.server.check()
            kept.server.check()
        assert len(kept.made) == 1 + 6
        kept.clock.now += 1  # 64 s: 63 s after it was first held
        kept.server.check()
        with pytest.raises(EngineGivenUpError, match=mentioning("63 s", "small.port")) as end:
            kept.server.check()
    assert "\n" not in str(end.value)


def test_no_server_starts_on_devices_that_the_trainer_has(keep):
    kept = keep(2)
    kept.record.allow_starts(False)
    kept.die()
    kept.clock.now += 50
    for _ in range(3):
        kept.server.check()
    assert len(kept.made) == 1
    kept.record.allow_starts(True)
    kept.until_healthy()
    assert kept.record.servers()[0].incarnation == 2


def test_a_server_that_starts_leaves_devices_that_the_trainer_takes_and_it_costs_no_restart(keep):
    kept = keep(2)
    kept.die()
    kept.clock.now += 1
    kept.until(lambda: len(kept.made) == 2)
    assert kept.record.starting() == ["engine0"]
    kept.record.allow_starts(False)
    kept.server.check()
    assert kept.made[1].poll() is not None
    assert kept.record.starting() == kept.record.servers() == []
    kept.server.check()
    assert len(kept.made) == 2
    kept.record.allow_starts(True)
    kept.until_healthy()
    assert kept.record.starting() == []
    assert kept.record.servers()[0].incarnation == 3
    assert kept.budget.taken == 1


def test_a_lost_server_is_published_until_its_process_is_gone(keep, monkeypatch):
    """Who isn't published, and doesn't start, is on no device."""
    kept = keep(2)
    kill, published = kept.made[0].kill, []

    def spy() -> None:
        kill()
        published.append(kept.record.servers())

    monkeypatch.setattr(kept.made[0], "kill", spy)
    kept.record.report_lost("engine0", 1)
    kept.server.check()
    assert [server.name for server in published[0]] == ["engine0"]
    assert kept.record.servers() == []


def test_a_run_that_stops_ends_what_starts_or_is_lost_and_starts_nothing(keep):
    kept = keep(2)
    kept.server.free_devices()
    assert kept.made[0].poll() is None
    kept.record.report_lost("engine0", 1)
    kept.server.free_devices()
    assert kept.made[0].poll() is not None
    assert kept.record.servers() == []
    kept.server.start()
    kept.server.free_devices()
    assert kept.made[1].poll() is not None
    kept.clock.now += 50
    kept.server.check()
    assert len(kept.made) == 2
    assert kept.record.starting() == []


def test_the_first_start_too_waits_for_the_devices(tmp_path):
    kept = Kept(tmp_path, 0)
    kept.record.allow_starts(False)
    kept.server.start()
    kept.server.check()
    assert not kept.made
    kept.record.allow_starts(True)
    kept.until_healthy()
    kept.server.stop(at_once=True)
    assert kept.server.incarnation == 1
