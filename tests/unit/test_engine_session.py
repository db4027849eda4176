"""The engine session of one rank, with servers that refuse requests, hang or end: when the session gives an engine up,
and which error every rank then raises."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet import membership
from megatron_dppo.fleet.endpoint import FleetEndpoint, RecordClient, record_of_command
from megatron_dppo.fleet.generation import GenerationJob
from megatron_dppo.fleet.membership import EngineUnavailableError
from megatron_dppo.fleet.record import FleetRecord, Server
from megatron_dppo.loop.engine_session import EngineSession, WeightsLostError
from megatron_dppo.model.shape import TRAINER_PARTS, TrainerPart
from megatron_dppo.spec import ModelSpec, RunSpec
from megatron_dppo.system.async_runner import AsyncRunner
from tests.integration.kept_fleet import config_of
from tests.patience import own_patience
from tests.unit.small_fleet import KEYS, SmallServer
from tests.unit.test_engine_checksums import model_shape

pytestmark = pytest.mark.usefixtures("one_rank")


def spec_of(config: TrainConfig) -> RunSpec:
    """The facts of a run of a small model that no file has."""
    return RunSpec.of_model(config, ModelSpec.of(config, model_shape(), {}))


class Small:
    """A session of rank 0 with one ``SmallServer``, which is in the record of the fleet."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, trainer: Any = None, **engine: object
    ) -> None:
        self.runner = AsyncRunner()
        self.server = self.runner.run(SmallServer("engine0").start())
        config = config_of(
            folder,
            folder,
            **{"servers": 1, "start_timeout_s": 0.5, "hang_timeout_s": 1.0, **engine},
            router=False,
        )
        self.record = FleetRecord(folder)
        self.record.publish(Server("engine0", self.server.url, 1, 17))
        assert KEYS.admin is not None
        self.endpoint = FleetEndpoint(self.record, KEYS.admin, "127.0.0.1")
        self.endpoint.start()
        for name, value in {**KEYS.to_variables(), **self.endpoint.variables}.items():
            monkeypatch.setenv(name, value)
        topology: Any = SimpleNamespace(rank=0)
        trainer = trainer or SimpleNamespace(topology=topology, shape=None, weights=dict)
        self.session = EngineSession(
            config, spec_of(config), trainer, stop=lambda: False, fence=lambda: None
        )
        updater: Any = self.session._updater
        updater._plan = ()  # only a real trainer could make a plan

    def close(self) -> None:
        self.session.__exit__(None, None, None)
        self.runner.run(self.server.die())
        self.runner.close()
        self.endpoint.stop()


@pytest.fixture
def open_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Small]]:
    monkeypatch.setattr(membership, "_POLL_S", 0.02)
    opened: list[Small] = []

    def open_one(**settings: Any) -> Small:
        opened.append(Small(tmp_path, monkeypatch, **settings))
        return opened[-1]

    yield open_one
    for small in opened:
        small.close()


@pytest.mark.parametrize(
    ("status", "text", "calls"),
    [
        (401, "Unauthorized", 1),
        # Two attempts, and a health check in between.
        (400, "no such tensor", 3),
    ],
)
def test_what_the_server_refuses_is_not_tried_six_times(open_small, status, text, calls):
    small = open_small()
    small.server.info["/server_info"] = (status, text)
    with pytest.raises(EngineUnavailableError, match=f"{status}: {text}"):
        small.session.connect()
    assert small.server.asked["/server_info"] == calls


def test_a_server_that_fails_is_replaced(open_small):
    small = open_small()
    small.server.info["/server_info"] = (500, "out of memory")
    with pytest.raises(EngineUnavailableError, match="500: out of memory"):
        small.session.connect()
    assert small.record.take_report("engine0") == 1


def test_a_stopped_scheduler_costs_the_hang_time_out_and_a_probe(open_small, monkeypatch):
    """The HTTP process of the server still answers. The server costs the run one hang timeout (1.0 s) and one health
    check (0.3 s), not two control timeouts of 60 s."""
    monkeypatch.setattr(membership, "_ANSWER_S", 0.3)
    small = open_small()
    small.server.deaf |= {"/server_info", "/health_generate"}
    start, patience = time.monotonic(), own_patience(10)
    with pytest.raises(EngineUnavailableError, match="engine0"):
        small.session.connect()
    # Then the session waits for another server for 0.5 s.
    assert time.monotonic() - start > 1.0 + 0.3 + 0.5
    assert not patience.is_exhausted()
    assert small.record.take_report("engine0") == 1


def test_no_server_in_time_is_told_as_what_it_is(open_small):
    """Every rank raises, so that all of them can save a checkpoint."""
    small = open_small()
    small.runner.run(small.server.die())
    with pytest.raises(EngineUnavailableError, match="1 s"):
        small.session.connect()


class ParkedParts:
    """The methods of a trainer with which it frees shared devices. ``parked``: the parts that it has moved off them."""

    def __init__(self) -> None:
        self.topology = SimpleNamespace(rank=0)
        self.shape = None
        self.weights = dict
        self.parked: frozenset[TrainerPart] = frozenset()

    def park(self, parts: Sequence[TrainerPart]) -> None:
        self.parked |= set(parts)


def test_the_trainer_leaves_its_devices_to_wait_for_a_server(open_small):
    """The only server is lost while the weights are still on the devices for the next update. A new server needs the
    devices, so the trainer parks the weights too."""
    trainer = ParkedParts()
    small = open_small(trainer=trainer, placement="colocated", start_timeout_s=30.0)
    session, [server] = small.session, small.record.servers()
    session._is_attached = True
    session._make_room()
    assert trainer.parked == set(TRAINER_PARTS) - {"weights"}
    assert not small.record.begin_start(server.name)
    small.record.withdraw(server)
    supervisor = Thread(target=publish_if_allowed, args=(small.record, server))
    supervisor.start()
    assert [member.server for member in session._agree_on_members()] == [server]
    assert trainer.parked == set(TRAINER_PARTS)
    supervisor.join()


def publish_if_allowed(record: FleetRecord, server: Server) -> None:
    """Publish ``server`` as soon as it may start."""
    patience = own_patience(20)
    while not record.begin_start(server.name) and not patience.is_exhausted():
        time.sleep(0.02)
    if record.begin_start(server.name):
        record.publish(server)


def test_a_generation_that_is_refused_gives_the_engine_up_on_every_rank(open_small):
    small = open_small()
    small.server.refuses = True
    session = small.session
    members = session._agree_on_members()
    session._connections.runner.run(session._connections.client.serve(members, 1))
    job = GenerationJob((Problem(0, "a", "b", (3, 4)),), 2, SamplingParams(4))
    with pytest.raises(EngineUnavailableError, match=r"EngineRequestError: .* 400: "):
        session.finish(session.start(job, "rollout"))


def test_responses_are_parsed_beside_this_process_and_told_as_they_come(open_small):
    small = open_small()
    session = small.session
    session._connections.parser._smallest = 0
    members = session._agree_on_members()
    session._connections.runner.run(session._connections.client.serve(members, 1))
    problems = (Problem(0, "a", "b", (3, 4)), Problem(1, "c", "d", (9,)))
    arrivals: list[tuple[Any, str]] = []
    generation = session.start(
        GenerationJob(problems, 2, SamplingParams(4)),
        "rollout",
        lambda key, t: arrivals.append((key, t.text)),
    )
    answers = session.finish(generation)
    assert [t.token_ids.tolist() for t in answers] == [[3, 4, 3], [3, 4, 3], [9, 9], [9, 9]]
    assert sorted(arrivals) == [((p, s), "engine0") for p in (0, 1) for s in (0, 1)]
    worker = session._connections.parser._worker
    assert worker is not None
    assert not worker.ended.done()


def test_rank_0_keeps_the_record_where_a_launcher_started_the_ranks(tmp_path, monkeypatch):
    monkeypatch.delenv("MEGATRON_DPPO_FLEET", raising=False)
    runner = AsyncRunner()
    small = runner.run(SmallServer("elsewhere").start())
    config = config_of(tmp_path, tmp_path, servers=0, urls=[small.url], router=False)
    topology: Any = SimpleNamespace(rank=0)
    trainer: Any = SimpleNamespace(topology=topology, shape=None, weights=dict)
    with EngineSession(config, spec_of(config), trainer, stop=lambda: False) as session:
        [server] = session._connections.record.servers()
        assert (server.url, server.origin) == (small.url, "config")
        command = record_of_command(str(tmp_path))
        assert isinstance(command, RecordClient)
        assert command.servers() == [server]
    assert isinstance(record_of_command(str(tmp_path)), FleetRecord)
    runner.run(small.die())
    runner.close()


# --- an evaluation, whose responses must all come from the weights with which it began


def evaluate(small: Small, *, dies: bool = False) -> list[str]:
    """Return the texts of two responses that weight version 1 samples, while the trainer already has version 2.
    ``dies``: whether the server dies during the generation."""
    session = small.session
    connections = session._connections
    connections._limits = replace(connections._limits, request_timeout_s=0.1)
    session.updates.version = 1
    connections.runner.run(connections.client.serve(session._agree_on_members(), 1))
    job = GenerationJob((Problem(0, "a", "b", (3, 4)),), 2, SamplingParams(4))
    generation = session.start(job, "evaluate")
    if dies:
        small.runner.run(small.server.die())
    return [t.text for t in session.finish(generation, 2, mixes=False)]


def test_a_response_that_takes_too_long_is_asked_for_again_where_servers_go_on(open_small, caplog):
    small = open_small()
    small.server.delay_s = 60.0

    def answer_after_loss(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("engine lost"):
            small.server.delay_s = 0.0
        return True

    caplog.handler.addFilter(answer_after_loss)
    assert evaluate(small) == ["engine0", "engine0"]
    assert "3 attempts failed, the last: no response within 0.1 s" in caplog.text


def test_a_server_that_goes_on_without_a_response_is_given_up(open_small):
    small = open_small()
    small.server.delay_s = 60.0
    with pytest.raises(EngineUnavailableError, match="6 times"):
        evaluate(small)


def test_without_a_server_the_weights_are_lost(open_small):
    small = open_small()
    small.server.delay_s = 60.0
    with pytest.raises(WeightsLostError, match="version 1"):
        evaluate(small, dies=True)


# --- a generation of a repeated step, before the servers have weights


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_a_wait_for_missing_responses_first_sends_the_weights(open_small, monkeypatch, stored):
    small = open_small()
    small.server.version = 2
    session, connections = small.session, small.session._connections
    # Without an update the wait would not end.
    monkeypatch.setattr(connections, "_stop", own_patience(10).is_exhausted)
    updates: list[int] = []

    def restore(version: int) -> None:
        updates.append(version)
        connections.serve(session._agree_on_members(), version)

    monkeypatch.setattr(session, "_restore", restore)
    job = GenerationJob((Problem(0, "a", "b", (3, 4)),), 2, SamplingParams(4))
    done = {(0, i): Trajectory.of_response((3, 4), [5], text="stored") for i in range(stored)}
    generation = session.start(job, "step 3: generate", done=done)
    texts = [t.text for t in session.finish(generation, 2)]
    assert texts == ["stored"] * stored + ["engine0"] * (2 - stored)
    assert updates == ([] if stored == 2 else [2])
