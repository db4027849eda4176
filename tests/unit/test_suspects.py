"""A prompt that crashes every server ends the run, and the error names the prompt. Killed servers don't end the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config.schema import WeightSyncConfig
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.errors import GenerationInterruptedError
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.fleet.membership import FatalPromptError, Member
from megatron_dppo.fleet.record import Server
from megatron_dppo.loop import server_access
from megatron_dppo.system.async_runner import AsyncRunner
from megatron_dppo.trainer import collectives
from megatron_dppo.weights.engine_weights import Occupation
from megatron_dppo.weights.transaction import WeightUpdater
from tests.unit.small_fleet import SmallRouter, SmallServer
from tests.unit.test_engine_session import Small
from tests.unit.test_fleet_client import Fleet, ask
from tests.unit.weight_doubles import Engine, Source

pytestmark = pytest.mark.usefixtures("one_rank")

BAD = 13
CrashRule = Callable[[str, int, int], bool]
"""Returns whether a prompt kills a server, from the server's name and incarnation and the prompt's first token."""


class RestartingFleet(Small):
    """A session whose servers are replaced when they were reported lost, as the supervisor does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, dies: CrashRule):
        super().__init__(folder, monkeypatch, start_timeout_s=20.0)
        self._dies = dies
        self.server.dies_of = lambda token: dies("engine0", 1, token)
        self.all_servers = [self.server]
        self.servers = {"engine0": Server("engine0", self.server.url, 1, 17)}
        for number in range(1, count):
            self._start(f"engine{number}", 1)
        session = self.session
        session._updater = WeightUpdater(
            Source(),
            WeightSyncConfig(strategy="tensor"),
            collectives.first_failure,
            session._open_engine,
            session._connections.runner,
        )

        async def connect(access: Any, member: Member) -> Engine:
            engine = Engine(member.server.url)
            engine.occupation = Occupation(member.server.url)
            return engine

        monkeypatch.setattr(server_access.ServerAccess, "_connect", connect)
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()

    def _start(self, name: str, incarnation: int) -> None:
        server = SmallServer(name)
        server.dies_of = lambda token: self._dies(name, incarnation, token)
        self.runner.run(server.start())
        self.all_servers.append(server)
        self.servers[name] = Server(name, server.url, incarnation, 17)
        self.record.publish(self.servers[name])

    def _supervise(self) -> None:
        while not self._stop.wait(0.02):
            for name, server in list(self.servers.items()):
                if self.record.take_report(name) == server.incarnation:
                    self.record.withdraw(server)
                    self._start(name, server.incarnation + 1)

    def generate(self, tokens: Sequence[int]) -> list[list[int]]:
        """Return two responses for each token, whose prompt begins with the token."""
        self.session.connect()
        self.session.update_weights(1)
        problems = [Problem(i, "p", "a", (token, 7)) for i, token in enumerate(tokens)]
        job = GenerationJob(problems, 2, SamplingParams(4))
        answers = self.session.finish(self.session.start(job, "rollout"))
        return [t.response_ids.tolist() for t in answers]

    def close(self) -> None:
        self._stop.set()
        self._supervisor.join()
        for server in self.all_servers[1:]:
            self.runner.run(server.die())
        super().close()

    @property
    def incarnations(self) -> dict[str, int]:
        return {name: server.incarnation for name, server in self.servers.items()}


@pytest.fixture
def open_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int, CrashRule], RestartingFleet]]:
    monkeypatch.setattr(membership, "_POLL_S", 0.02)
    fleets: list[RestartingFleet] = []

    def open_with_servers(count: int, dies: CrashRule) -> RestartingFleet:
        fleets.append(RestartingFleet(tmp_path, monkeypatch, count, dies))
        return fleets[-1]

    yield open_with_servers
    for fleet in fleets:
        fleet.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prompt_that_servers_die_of_ends_the_run_by_name(open_fleet, tmp_path, count):
    fleet = open_fleet(count, lambda name, incarnation, token: token == BAD)
    fleet.session._place_of = lambda ids: {BAD: "train.jsonl, line 3"}.get(ids[0])
    for number in range(count):
        for incarnation in range(1, 9):
            log = tmp_path / "logs" / f"engine{number}-{incarnation}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(
                "Traceback (most recent call last):\n"
                '  File "embedding.py", line 1, in forward\n'
                f"IndexError: row 515 of 512 in {log.name}\n"
            )
    with pytest.raises(FatalPromptError) as caught:
        fleet.generate([11, 12, BAD, 14])
    assert "train.jsonl, line 3" in str(caught.value)
    assert "IndexError: row 515 of 512 in engine0-1.log" in str(caught.value)
    # A server dies at most three times: while the prompt becomes a suspect, and when it is generated alone.
    assert max(fleet.incarnations.values()) <= 4


def test_without_a_known_place_the_problem_is_named(open_fleet):
    fleet = open_fleet(2, lambda name, incarnation, token: token == BAD)
    with pytest.raises(FatalPromptError, match="problem 2"):
        fleet.generate([11, 12, BAD, 14])


@pytest.mark.parametrize(("count", "kills"), [(1, 2), (2, 1), (3, 1)])
def test_servers_that_are_killed_end_no_run(open_fleet, count, kills, caplog):
    """Every request is in flight at two losses at least, so every prompt is a suspect and is generated alone."""
    fleet = open_fleet(count, lambda name, incarnation, token: incarnation <= kills)
    assert fleet.generate([11, 12]) == [[11], [11], [12], [12]]
    assert set(fleet.incarnations.values()) == {kills + 1}
    assert fleet.session._connections.client.suspect_count == 0
    assert "asked alone" in caplog.text


def test_a_server_that_is_killed_while_a_prompt_is_asked_alone_ends_no_run(open_fleet):
    """The next server answers the prompt."""
    fleet = open_fleet(
        2, lambda name, incarnation, token: incarnation <= (2 if name == "engine0" else 1)
    )
    assert fleet.generate([11, 12]) == [[11], [11], [12], [12]]


def test_a_server_that_hangs_at_a_question_ends_no_run(open_fleet, monkeypatch):
    monkeypatch.setattr("megatron_dppo.fleet.client._QUESTION_SECONDS", 0.3)
    fleet = open_fleet(2, lambda name, incarnation, token: incarnation == 1)
    start = fleet._start

    def start_slow(name: str, incarnation: int) -> None:
        start(name, incarnation)
        fleet.all_servers[-1].delay_s = 1.0

    fleet._start = start_slow
    assert fleet.generate([11, 12]) == [[11], [11], [12], [12]]


@pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])
def test_what_was_in_flight_at_two_losses_is_suspect_and_what_was_answered_is_not(routed):
    servers = [SmallServer("engine0"), SmallServer("engine1")]
    for server in servers:
        server.dies_of = lambda token: token == BAD
    fleet = Fleet(servers, SmallRouter() if routed else None)
    with AsyncRunner() as runner, pytest.raises(GenerationInterruptedError) as caught:
        ask(runner, fleet, BAD + 1, concurrency=1)
    assert list(caught.value.completed) == list(range(BAD))
    [suspect] = fleet.client._suspects.questionable()
    assert list(suspect.request.prompt_ids) == [BAD]
    assert {s.name for s in suspect.servers} == {"engine0", "engine1"}
