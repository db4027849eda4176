"""Devices that trainer and servers share: the order in which both release and restore their parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.membership import EngineUnavailableError, Member
from megatron_dppo.fleet.record import Server
from megatron_dppo.loop import server_access
from megatron_dppo.model.shape import TRAINER_PARTS
from megatron_dppo.trainer import collectives
from megatron_dppo.weights.engine_weights import Occupation
from megatron_dppo.weights.transaction import WeightUpdater
from tests.messages import mentioning
from tests.unit.small_fleet import SmallServer
from tests.unit.test_engine_session import Small
from tests.unit.weight_doubles import Engine, Source

pytestmark = pytest.mark.usefixtures("one_rank")


class SharedTrainer:
    """A trainer that only notes which parts it parks and unparks."""

    shape, weights = None, dict

    def __init__(self, moments: list[str]) -> None:
        self.topology = SimpleNamespace(rank=0)
        self.parked: frozenset[str] = frozenset()
        self._moments = moments

    def park(self, parts: Collection[str]) -> None:
        self._moments.append(f"park {' '.join(sorted(parts))}")
        self.parked |= set(parts)

    def unpark(self, parts: Collection[str] | None = None) -> None:
        self._moments.append(f"unpark {'all' if parts is None else ' '.join(sorted(parts))}")
        self.parked -= set(self.parked if parts is None else parts)


class SharedEngine(Engine):
    """An engine that notes in ``moments`` what it releases and restores."""

    def __init__(self, name: str, url: str, moments: list[str]) -> None:
        super().__init__(url)
        self.name = name
        self.occupation = Occupation(url)
        self._moments = moments

    async def interrupt(self) -> None:
        self.step("interrupt")

    async def release(self, tags: Collection[Any] = ()) -> None:
        with self.occupation.changing("release", "resident", "released", tags):
            self.step("release")
            self._moments.append(f"{self.name} releases {' '.join(sorted(tags))}")

    async def restore(self, tags: Collection[Any] | None = None) -> None:
        with self.occupation.changing("restore", "released", "resident", tags or ()):
            self._moments.append(f"{self.name} restores {' '.join(sorted(tags or ()))}")


class SharedSession(Small):
    """A session with shared devices. ``faults``: for each server, the call in which its next connection fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moments: list[str] = []
        self.faults: dict[str, str] = {}
        trainer = SharedTrainer(self.moments)
        super().__init__(folder, monkeypatch, trainer, placement="colocated", start_timeout_s=5)

        async def connect(access: Any, member: Member) -> SharedEngine:
            engine = SharedEngine(member.server.name, member.server.url, self.moments)
            engine.failing = self.faults.pop(engine.name, None)
            engine.error = EngineAnswerError("planted")
            return engine

        monkeypatch.setattr(server_access.ServerAccess, "_connect", connect)
        session = self.session
        session._updater = WeightUpdater(
            Source(),
            WeightSyncConfig(strategy="tensor"),
            collectives.first_failure,
            session._open_engine,
            session._connections.runner,
            leave_devices=session._devices.leave,
        )

    def start_another(self) -> None:
        """Start a second server and publish it."""
        self.second = self.runner.run(SmallServer("engine1").start())
        self.record.publish(Server("engine1", self.second.url, 1, 18))

    def lose_first(self) -> None:
        """Do what the supervisor does after it has ended a server that was reported lost."""
        assert self.record.take_report("engine0") == 1
        self.moments.append("engine0 is gone")
        self.record.withdraw(self.record.servers()[0])

    def next_moments(self) -> list[str]:
        moments = self.moments[:]
        self.moments.clear()
        return moments


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedSession]:
    monkeypatch.setattr(membership, "_POLL_S", 0.02)
    small = SharedSession(tmp_path, monkeypatch)
    small.session.connect()
    assert small.next_moments() == [f"park {' '.join(sorted(TRAINER_PARTS))}"]
    yield small
    small.close()


UPDATE = [
    "engine0 releases cuda_graph kv_cache",
    "unpark weights",
    "park weights",
    "engine0 restores cuda_graph kv_cache",
]


def test_in_the_first_update_the_servers_have_released_all_but_their_weights(shared):
    shared.session.update_weights(1)
    assert shared.next_moments() == UPDATE


def test_so_have_they_when_an_update_that_failed_in_the_end_is_tried_again(shared):
    """When an update is retried, the servers have released all but their weights, too."""
    shared.faults["engine0"] = "score"
    shared.session._is_attached = False
    shared.session._admit()
    shared.session.update_weights(1)
    assert shared.next_moments() == UPDATE * 2


def test_a_server_that_came_between_two_updates_releases_before_the_trainer_s_turn(shared):
    shared.session.update_weights(1)
    shared.start_another()
    shared.next_moments()
    shared.session.take_devices()
    assert shared.next_moments() == [
        "engine0 releases cuda_graph kv_cache weights",
        "engine1 releases cuda_graph kv_cache weights",
        "unpark all",
    ]
    shared.session.update_weights(2)
    assert shared.next_moments()[1:] == [
        *("engine0 restores weights", "engine1 restores weights", "park weights"),
        *("engine0 restores cuda_graph kv_cache", "engine1 restores cuda_graph kv_cache"),
    ]


def test_where_the_last_server_died_in_its_turn_the_trainer_leaves_so_that_the_next_may_start(
    shared,
):
    shared.session.update_weights(1)
    shared.session.take_devices()
    server = shared.record.servers()[0]
    shared.record.withdraw(server)
    shared.next_moments()

    def supervise() -> None:
        while not shared.record.begin_start("engine0"):
            time.sleep(0.05)
        shared.moments.append("engine0 starts")
        shared.record.publish(replace(server, incarnation=2))
        shared.record.end_start("engine0")

    supervisor = threading.Thread(target=supervise, daemon=True)
    supervisor.start()
    shared.session.update_weights(2)
    all_but_weights = " ".join(sorted(set(TRAINER_PARTS) - {"weights"}))
    assert shared.next_moments() == [
        f"park {all_but_weights}",
        "park weights",
        "engine0 starts",
        *UPDATE,
    ]


def test_the_trainer_waits_until_a_server_that_does_not_release_is_gone(shared):
    """The supervisor reacts to the report after half a second."""
    shared.faults["engine0"] = "release"
    shared.session._is_attached = False
    shared.session._admit()
    shared.next_moments()
    timer = threading.Timer(0.5, shared.lose_first)
    timer.start()
    shared.session.take_devices()
    assert shared.next_moments() == ["engine0 is gone", "unpark all"]
    timer.join()


def test_the_trainer_waits_until_nothing_starts_and_says_what_does_not_leave(shared, monkeypatch):
    shared.record.begin_start("engine7")
    timer = threading.Timer(0.5, lambda: shared.record.end_start("engine7"))
    timer.start()
    shared.session.take_devices()
    assert not shared.record.begin_start("engine7")
    shared.record.allow_starts(True)
    shared.record.begin_start("engine7")
    monkeypatch.setattr(membership, "_CLEAR_S", 0.1)
    with pytest.raises(EngineUnavailableError, match=mentioning("0 s", "engine7")):
        shared.session.take_devices()
    timer.join()


def test_a_server_that_came_in_the_trainer_s_turn_releases_before_weights_are_restored(shared):
    shared.session.update_weights(1)
    shared.session.take_devices()
    shared.start_another()
    shared.next_moments()
    shared.session.update_weights(2)
    moments = shared.next_moments()
    assert moments[:3] == [
        "park gradients optimizer reference",
        "engine1 releases cuda_graph kv_cache",
        "engine0 restores weights",
    ]
    assert moments[3] == "park weights"
