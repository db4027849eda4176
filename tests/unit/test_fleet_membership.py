"""Rank 0 chooses the servers of a weight update. Small HTTP servers answer, hang or fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.endpoint import FleetEndpoint, RecordClient
from megatron_dppo.fleet.membership import (
    EngineUnavailableError,
    FleetMembership,
    Member,
    ServerStates,
)
from megatron_dppo.fleet.record import FleetRecord, Keys, Server, attachment_seal
from megatron_dppo.system.async_runner import AsyncRunner
from tests.integration.kept_fleet import config_of
from tests.patience import own_patience
from tests.unit.small_fleet import KEYS, SmallServer


class Book:
    """A FleetMembership, and the small servers that are published in its record.

    ``unfit``: URL of a server that does not fit the run -> reason; filled before the server is published.
    """

    def __init__(self, folder: Path, unfit: dict[str, str] | None = None, **engine: Any) -> None:
        self.runner = AsyncRunner()
        self.stopping = False
        self.unfit = {} if unfit is None else unfit
        self.record = FleetRecord(folder)
        self.endpoint = FleetEndpoint(self.record, "admin", "127.0.0.1")
        self.endpoint.start()
        engines = config_of(folder, folder, start_timeout_s=0.6, **engine).engine
        self.membership = FleetMembership(
            RecordClient(self.endpoint.url, KEYS),
            engines,
            self.runner,
            self.check,
            lambda: self.stopping,
        )
        self.servers: list[SmallServer] = []

    async def check(self, member: Member) -> None:
        if member.server.url in self.unfit:
            raise EngineMismatchError(self.unfit[member.server.url])

    def start(self, name: str, incarnation: int = 1) -> Server:
        small = self.runner.run(SmallServer(name).start())
        self.servers.append(small)
        server = Server(name, small.url, incarnation, 17)
        self.record.publish(server)
        return server

    def attach(self, unfit: str | None = None) -> Server:
        small = self.runner.run(SmallServer("elsewhere").start())
        self.servers.append(small)
        if unfit is not None:
            self.unfit[small.url] = unfit
        return self.record.attach(small.url, attachment_seal(small.url))

    def small(self, server: Server) -> SmallServer:
        return next(s for s in self.servers if s.url == server.url)

    def die(self, server: Server) -> None:
        self.runner.run(self.small(server).die())

    def choose(self, current: list[Member], **suspended: str) -> list[Member]:
        members = self.membership.choose(current, suspended)
        assert members is not None
        return members

    def close(self) -> None:
        for server in self.servers:
            server.silent = False
            self.runner.run(server.die())
        self.runner.close()
        self.endpoint.stop()


@pytest.fixture
def open_book(tmp_path, monkeypatch) -> Iterator[Callable[..., Book]]:
    for name in ("_ANSWER_S", "_GENERATE_S"):
        monkeypatch.setattr(membership, name, 1.0)
    monkeypatch.setattr(membership, "_SETTLE_S", 0.3)
    monkeypatch.setattr(membership, "_POLL_S", 0.02)
    monkeypatch.setenv("MEGATRON_DPPO_API_KEY", "user")
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "admin")
    books: list[Book] = []

    def open_one(**engine: Any) -> Book:
        books.append(Book(tmp_path, **engine))
        return books[-1]

    yield open_one
    for book in books:
        book.close()


def names(members: list[Member]) -> list[str]:
    return [member.server.name for member in members]


def test_all_that_answer_are_chosen_in_order(open_book):
    book = open_book()
    book.start("engine1")
    book.start("engine0")
    members = book.choose([])
    assert names(members) == ["engine0", "engine1"]
    assert {m.keys for m in members} == {KEYS}
    assert book.choose(members) == members


def test_those_that_the_run_did_not_start_may_take_long_to_answer_first(open_book):
    book = open_book()
    book.start("engine0")
    book.attach()
    limits = {m.server.replaceable: m.first_answer_s for m in book.choose([])}
    assert limits == {True: 0.0, False: 0.6}  # engine.start_timeout_s


def test_the_first_time_the_others_are_waited_for_but_not_for_ever(open_book):
    book = open_book(servers=3)
    book.start("engine0")
    start, patience = time.monotonic(), own_patience(30)
    members = book.choose([])
    assert names(members) == ["engine0"]
    assert time.monotonic() - start >= 0.3
    assert not patience.is_exhausted()
    book.start("engine1")
    assert names(book.choose(members)) == ["engine0", "engine1"]


def test_one_that_does_not_answer_is_left_out_without_slowing_every_update(open_book, monkeypatch):
    book, asked_servers = open_book(), []
    answers = book.membership._answers

    def counted(member: Member) -> Any:
        asked_servers.append(member.server.name)
        return answers(member)

    monkeypatch.setattr(book.membership, "_answers", counted)
    members = [Member(book.start("engine0"), Keys())]
    book.small(book.start("engine1")).silent = True
    assert names(book.choose(members)) == ["engine0"]
    assert asked_servers == ["engine1"]
    assert names(book.choose(members)) == ["engine0"]
    assert asked_servers == ["engine1"]  # the silent server is not asked again so soon


def test_nobody_in_time_is_an_error_that_says_who_was_seen(open_book):
    book = open_book(servers=1)
    with pytest.raises(EngineUnavailableError, match="1 s"):
        book.choose([])
    server = book.start("engine0")
    book.die(server)
    with pytest.raises(EngineUnavailableError, match=f"engine0 at {server.url} "):
        book.choose([])


def test_a_stop_ends_the_wait(open_book):
    book = open_book()
    book.stopping = True
    assert book.membership.choose([], {}) is None


def test_a_suspended_server_is_out_until_the_supervisor_has_replaced_it(open_book):
    book = open_book()
    members = [Member(book.start(name), Keys()) for name in ("engine0", "engine1")]
    remaining = book.choose(members, engine1="broke off")
    assert names(remaining) == ["engine0"]
    assert book.record.take_report("engine1") == 1
    assert names(book.choose(remaining)) == ["engine0"]
    book.record.withdraw(members[1].server)
    book.start("engine1", incarnation=2)
    both = book.choose(remaining)
    assert [(m.server.name, m.server.incarnation) for m in both] == [
        ("engine0", 1), ("engine1", 2)
    ]  # fmt: skip


def test_a_server_that_is_lost_after_it_served_is_described_by_its_loss(open_book):
    book = open_book()
    members = book.choose([Member(book.start(n), Keys()) for n in ("engine0", "engine1")])
    book.membership.commit(members, 1)
    book.choose(members, engine1="broke off")
    states = book.membership._states
    described = {m.server.name: states[m.server].describe(m.server) for m in members}
    assert described == {"engine0": "serves", "engine1": "lost: broke off"}


def test_a_first_server_that_goes_again_is_waited_for_anew(open_book, monkeypatch):
    book = open_book(servers=2)
    members = [Member(book.start("engine0"), Keys())]
    answers = iter([members, []])
    monkeypatch.setattr(book.membership, "_ready_members", lambda current: next(answers, []))
    with pytest.raises(EngineUnavailableError):
        book.choose([])


def test_states_are_kept_while_another_thread_adds_one():
    servers = [Server("engine0", "http://a", 1, 17)]
    states = ServerStates()

    class Adding(list):
        def __contains__(self, server: object) -> bool:
            states[replace(servers[0], name=f"engine{len(states)}")]
            return super().__contains__(server)

    states[servers[0]].serves = True
    states.keep(Adding(servers))
    assert states[servers[0]].serves


def test_an_attached_server_that_was_suspended_comes_back_when_it_generates(open_book, monkeypatch):
    monkeypatch.setattr(membership, "ASK_AGAIN_S", 0.0)
    book = open_book()
    members = [Member(book.start("engine0"), Keys()), Member(book.attach(), Keys())]
    elsewhere = members[1].server
    book.small(elsewhere).silent = True
    remaining = book.choose(members, **{elsewhere.name: "silent"})
    assert names(remaining) == ["engine0"]
    assert book.record.take_report(elsewhere.name) is None
    assert names(book.choose(remaining)) == ["engine0"]
    book.small(elsewhere).silent = False
    assert names(book.choose(remaining)) == ["engine0", elsewhere.name]


def test_a_server_that_fails_an_update_is_left_out_of_it_and_then_replaced(open_book):
    book = open_book()
    members = book.choose([Member(book.start(n), Keys()) for n in ("engine0", "engine1")])
    bad = members[1].server
    book.membership.blame(members, [bad.url], "checksum")
    remaining = book.choose(members)
    assert names(remaining) == ["engine0"]
    book.membership.commit(remaining, 1)
    assert book.record.status()["servers"] == {
        "engine0": "serves",
        "engine1": "quarantined: checksum",
    }
    both = book.choose(remaining)
    assert names(both) == ["engine0", "engine1"]
    assert book.record.take_report("engine1") is None
    book.membership.blame(both, [bad.url], "checksum")
    assert book.record.take_report("engine1") == 1
    assert names(book.choose(both)) == ["engine0"]


def test_an_update_that_succeeds_forgives(open_book):
    book = open_book()
    members = book.choose([Member(book.start(n), Keys()) for n in ("engine0", "engine1")])
    for version in (1, 2, 3):
        book.membership.blame(members, [members[1].server.url], "timed out")
        remaining = book.choose(members)
        assert names(remaining) == ["engine0"]
        book.membership.commit(remaining, version)
        members = book.choose(remaining)
        assert names(members) == ["engine0", "engine1"]
        book.membership.commit(members, version)


def test_the_only_server_gets_a_second_try_at_once(open_book):
    book = open_book(servers=1)
    members = book.choose([Member(book.start("engine0"), Keys())])
    book.membership.blame(members, [members[0].server.url], "timed out")
    assert book.choose(members) == members
    book.membership.blame(members, [members[0].server.url], "timed out")
    assert book.record.take_report("engine0") == 1


def test_a_failed_update_nobody_is_to_blame_for_is_tried_with_all_that_answer(open_book):
    book = open_book()
    members = book.choose([Member(book.start(n), Keys()) for n in ("engine0", "engine1")])
    book.membership.blame(members, [], "a transfer timed out")
    assert book.choose(members) == members
    book.small(members[0].server).silent = True
    book.membership.blame(members, [], "a transfer timed out")
    assert names(book.choose(members)) == ["engine1"]
    assert book.record.take_report("engine0") == 1


@pytest.mark.parametrize(
    "deaf", [{"/server_info", "/health_generate"}, {"/health_generate"}],
    ids=["scheduler", "detokenizer"],
)  # fmt: skip
def test_one_that_hangs_behind_live_http_is_replaced_after_the_first_failed_update(open_book, deaf):
    """A request for a token finds that the server hangs, so no second update waits for the server."""
    book = open_book(servers=1)
    members = book.choose([Member(book.start("engine0"), Keys())])
    book.small(members[0].server).deaf |= deaf
    patience = own_patience(30)
    book.membership.blame(members, [members[0].server.url], "no answer within 60 s")
    assert not patience.is_exhausted()
    assert book.record.take_report("engine0") == 1


def test_one_that_generates_again_gets_a_second_try_and_is_paused_meanwhile(open_book):
    book = open_book(servers=1)
    members = book.choose([Member(book.start("engine0"), Keys())])
    small = book.small(members[0].server)
    book.membership.blame(members, [small.url], "no answer within 60 s")
    assert (small.asked["/continue_generation"], small.asked["/pause_generation"]) == (1, 1)
    assert book.choose(members) == members


def test_an_attached_server_that_fails_twice_is_refused_until_it_is_attached_anew(open_book):
    book = open_book()
    engine, elsewhere = book.start("engine0"), book.attach()
    members = [Member(engine, Keys()), Member(elsewhere, Keys("user"))]
    for version in (1, 2):
        book.membership.blame(members, [elsewhere.url], "checksum")
        remaining = book.choose(members)
        assert names(remaining) == ["engine0"]
        book.membership.commit(remaining, version)
    assert names(book.choose(remaining)) == ["engine0"]
    book.record.detach(elsewhere.url)
    assert names(book.choose(remaining)) == ["engine0"]
    book.record.attach(elsewhere.url, elsewhere.seal)
    assert names(book.choose(remaining)) == ["engine0", elsewhere.name]


def test_one_attached_by_command_that_does_not_fit_is_refused_and_the_run_goes_on(open_book):
    book = open_book()
    book.start("engine0")
    elsewhere = book.attach(unfit="another model")
    remaining = book.choose([])
    assert names(remaining) == ["engine0"]
    book.membership.commit(remaining, 1)
    assert book.record.status()["servers"][elsewhere.name] == "refused: another model"


def test_one_of_the_configuration_that_does_not_fit_ends_the_run(open_book):
    first = open_book()
    small = first.runner.run(SmallServer("elsewhere").start())
    first.servers.append(small)
    book = open_book(urls=[small.url], servers=0, unfit={small.url: "another model"})
    with pytest.raises(EngineMismatchError, match="model"):
        book.choose([])
