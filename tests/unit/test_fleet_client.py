"""A FleetClient over small HTTP servers: which server gets a call, and what happens to the call if the server dies or
hangs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_dppo.engine.client import EngineClient
from megatron_dppo.engine.errors import (
    EngineLostError,
    EngineRequestError,
    GenerationInterruptedError,
)
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams
from megatron_dppo.engine.server.continuation import Continuation
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.generation import GenerationLimits, Results, generate_many
from megatron_dppo.fleet.membership import MEMBERS, client_of
from megatron_dppo.fleet.record import Server
from megatron_dppo.fleet.router_link import HttpRouterLink
from megatron_dppo.system.async_runner import AsyncRunner
from tests.messages import mentioning
from tests.patience import own_patience
from tests.unit.small_fleet import KEYS, SmallRouter, SmallServer


class CountingClient(FleetClient):
    """A FleetClient that counts the answers to each request."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.answered: Counter[int] = Counter()

    async def generate(self, requests, rid):
        results = await super().generate(requests, rid)
        self.answered.update(r.key for r in requests)
        return results


@dataclass
class Fleet:
    """Servers, an optional router, and a client that uses them.

    ``registers``: whether the client registers the servers with the router. ``lost``: the servers that the client
    reported as lost."""

    servers: list[SmallServer]
    router: SmallRouter | None = None
    registers: bool = True
    lost: list[Server] = field(default_factory=list)

    async def open(self, version: int = 1) -> CountingClient:
        for server in self.servers:
            await server.start()
        link = None
        if self.router is not None:
            await self.router.start()
            link = HttpRouterLink(self.find, registers=self.registers)
        self.client = CountingClient(self.lost.append, link)
        await self.client.serve([s.member for s in self.servers], version)
        return self.client

    def find(self):
        """Return the router's server and keys for the link; None without a router."""
        return None if self.router is None else (self.router.server, KEYS)

    async def close(self) -> None:
        await self.client.close()
        for server in [*self.servers, *([self.router] if self.router else [])]:
            server.silent = False
            await server.die()


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(i, (i,), SamplingParams(1)) for i in range(count)]


def ask(
    runner: AsyncRunner,
    fleet: Fleet,
    count: int,
    meanwhile: Callable[[CountingClient], Awaitable[None]] | None = None,
    **limits: float,
) -> Results:
    """Return the results of ``count`` requests. ``meanwhile`` runs concurrently with the generation."""

    async def work() -> Results:
        client = await fleet.open()
        concurrent_task = asyncio.create_task(meanwhile(client)) if meanwhile else None  # type: ignore[arg-type]
        try:
            given: dict[str, Any] = {"concurrency": 8, "hang_timeout_s": 30} | limits
            all_limits = GenerationLimits(**given)
            return await generate_many(client, requests(count), all_limits)
        finally:
            if concurrent_task is not None:
                await concurrent_task
            await fleet.close()

    return runner.run(work())


def test_calls_name_the_adapters_of_the_committed_version(runner):
    server = SmallServer("a", version=5)

    async def work(adapters: bool) -> None:
        await server.start()
        client = FleetClient(lambda lost: None, adapters=adapters)
        await client.serve([server.member], 5)
        await client.generate(requests(1), "rid")
        await client.close()
        await server.die()

    runner.run(work(False))
    assert server.adapters == {None}
    runner.run(work(True))
    assert server.adapters == {None, "policy-5"}


async def wait_for_answers(client: CountingClient) -> None:
    """Return as soon as the generation has at least 8 answers."""
    while client.answered.total() < 8:
        await asyncio.sleep(0.005)


Meanwhile = Callable[[CountingClient], Awaitable[None]]


def kill(server: SmallServer) -> Meanwhile:
    """Return a function for ``ask`` that kills the server during the generation."""

    async def meanwhile(client: CountingClient) -> None:
        await wait_for_answers(client)
        await server.die()

    return meanwhile


def silence(server: SmallServer) -> Meanwhile:
    """Return a function for ``ask`` that stops the server during the generation."""

    async def meanwhile(client: CountingClient) -> None:
        await wait_for_answers(client)
        server.silent = True

    return meanwhile


def two_servers(delay_s: float = 0.05) -> list[SmallServer]:
    return [SmallServer("engine0", delay_s=delay_s), SmallServer("engine1", delay_s=delay_s)]


ROUTED = pytest.mark.parametrize("routed", [False, True], ids=["direct", "routed"])


@ROUTED
def test_calls_are_spread_evenly(runner, routed):
    fleet = Fleet(two_servers(), SmallRouter() if routed else None)
    results = ask(runner, fleet, 40)
    assert list(results) == list(range(40))
    assert [t.response_ids.tolist() for t in results.values()] == [[i] for i in range(40)]
    assert all(10 <= s.answered.total() <= 30 for s in fleet.servers)
    assert fleet.client.answered == Counter(range(40))


def test_a_slow_server_gets_fewer_calls(runner):
    fleet = Fleet([SmallServer("engine0", delay_s=0.01), SmallServer("engine1", delay_s=1.0)])
    ask(runner, fleet, 60)
    fast, slow = (s.answered.total() for s in fleet.servers)
    assert fast + slow == 60
    assert slow <= 20


@ROUTED
def test_a_dead_server_leaves_the_router_and_its_calls_are_asked_elsewhere_at_once(runner, routed):
    fleet = Fleet(two_servers(), SmallRouter() if routed else None)
    patience = own_patience(20)
    results = ask(runner, fleet, 60, kill(fleet.servers[1]))
    assert not patience.is_exhausted()
    assert list(results) == list(range(60))
    assert fleet.client.answered == Counter(range(60))
    assert [s.name for s in fleet.lost] == ["engine1"]
    assert fleet.client.take_losses().keys() == {"engine1"}
    assert fleet.client.take_losses() == {}
    if fleet.router is not None:
        assert list(fleet.router.workers.values()) == [fleet.servers[0].url]


@ROUTED
def test_calls_of_a_hung_server_that_nobody_kills_are_asked_elsewhere(runner, routed, monkeypatch):
    monkeypatch.setattr("megatron_dppo.fleet.client._REPLACED_SECONDS", 0.1)
    monkeypatch.setattr("megatron_dppo.fleet.client._PROBE_SECONDS", 0.2)
    fleet = Fleet(two_servers(), SmallRouter() if routed else None)
    results = ask(runner, fleet, 40, silence(fleet.servers[0]), hang_timeout_s=3)
    assert list(results) == list(range(40))
    assert "engine0" in [s.name for s in fleet.lost]


def test_a_hung_server_that_is_killed_fails_just_its_own_calls(runner):
    """The supervisor kills a server that was reported as lost. The router then answers 500 to the calls that it had
    sent to this server."""
    fleet = Fleet(two_servers(), SmallRouter())

    async def stop_one_and_replace(client: CountingClient) -> None:
        await silence(fleet.servers[0])(client)
        while not fleet.lost:
            await asyncio.sleep(0.01)
        await fleet.servers[0].die()

    patience = own_patience(20)
    results = ask(runner, fleet, 40, stop_one_and_replace, hang_timeout_s=3)
    assert not patience.is_exhausted()
    assert list(results) == list(range(40))
    assert fleet.client.answered == Counter(range(40))


@ROUTED
def test_answers_from_other_weights_are_refused_and_asked_again(runner, routed):
    """A server that was restarted on the same port has the checkpoint's weights, not those of the last update."""
    fleet = Fleet(
        [SmallServer("engine0"), SmallServer("engine1", version=0)],
        SmallRouter() if routed else None,
    )
    results = ask(runner, fleet, 20)
    assert {int(t.columns["weight_version"][0]) for t in results.values()} == {1}
    assert [s.name for s in fleet.lost] == ["engine1"]
    assert sum(fleet.servers[0].answered.values()) == 20


def test_when_nobody_is_left_what_is_finished_is_kept(runner):
    fleet = Fleet(two_servers())

    async def kill_all(client: CountingClient) -> None:
        await wait_for_answers(client)
        await asyncio.gather(*(s.die() for s in fleet.servers))

    with pytest.raises(GenerationInterruptedError, match=r"engine0: .*; engine1: ") as caught:
        ask(runner, fleet, 60, kill_all)
    assert 8 <= len(caught.value.completed) < 60
    assert {s.name for s in fleet.lost} == {"engine0", "engine1"}


@ROUTED
def test_a_refused_request_is_not_asked_elsewhere(runner, routed):
    fleet = Fleet(two_servers(), SmallRouter() if routed else None)
    for server in fleet.servers:
        server.refuses = True
    with pytest.raises(EngineRequestError, match=mentioning(400)) as caught:
        ask(runner, fleet, 1)
    assert caught.value.status == 400
    assert fleet.lost == []


def test_a_call_is_aborted_wherever_it_may_run(runner):
    fleet = Fleet(two_servers(), SmallRouter())

    async def abort() -> None:
        client = await fleet.open()
        await client.abort("a-00", 2)
        await fleet.close()

    runner.run(abort())
    assert [s.aborted for s in fleet.servers] == [["a-00_0", "a-00_1"]] * 2


# --- the router


def test_a_dead_router_is_done_without(runner):
    fleet = Fleet(two_servers(), SmallRouter())
    router = fleet.router
    assert router is not None

    async def kill_router(client: CountingClient) -> None:
        await wait_for_answers(client)
        await router.die()
        fleet.router = None

    patience = own_patience(20)
    assert list(ask(runner, fleet, 60, kill_router)) == list(range(60))
    assert not patience.is_exhausted()
    assert [s.name for s in fleet.lost] == ["router"]


@pytest.mark.parametrize("registers", [True, False], ids=["rank 0", "another rank"])
def test_a_router_that_came_back_is_used_again(runner, registers, monkeypatch):
    """Rank 0 registers the servers with the new router. The clients of other ranks wait until they are registered."""
    monkeypatch.setattr("megatron_dppo.fleet.router_link._RETRY_SECONDS", 0.1)
    fleet = Fleet(two_servers(), SmallRouter())
    first, second = fleet.router, SmallRouter(incarnation=2)
    assert first is not None
    used_urls = []

    async def replace_router(client: CountingClient) -> None:
        fleet.router = await second.start()
        client._router._registers = registers
        await first.die()
        await asyncio.sleep(0.3)
        if not registers:
            assert second.workers == {}
            second.workers = {s.name: s.url for s in fleet.servers}
        while not client._router.is_usable:
            await asyncio.sleep(0.01)
        used_urls.append(client._router.url)

    assert list(ask(runner, fleet, 200, replace_router)) == list(range(200))
    assert used_urls == [second.url]
    assert set(second.workers.values()) == {s.url for s in fleet.servers}


def test_a_hung_router_is_given_up(runner):
    router = SmallRouter()
    fleet = Fleet(two_servers(), router)
    assert list(ask(runner, fleet, 40, silence(router), hang_timeout_s=3)) == list(range(40))
    assert "router" in [s.name for s in fleet.lost]


def test_a_router_without_servers_is_done_without_until_it_has_them(runner):
    router = SmallRouter()
    fleet = Fleet(two_servers(), router)

    async def forget(client: CountingClient) -> None:
        await wait_for_answers(client)
        router.workers.clear()

    assert list(ask(runner, fleet, 60, forget)) == list(range(60))
    assert fleet.lost == []


def test_members_change_between_generations(runner):
    fleet = Fleet(two_servers(), SmallRouter())

    async def swap() -> tuple[list[str], list[str]]:
        client = await fleet.open()
        third = await SmallServer("engine2", version=2).start()
        fleet.servers[1].version = 2
        await client.serve([fleet.servers[1].member, third.member], 2)
        assert fleet.router is not None
        urls = sorted(fleet.router.workers.values())
        limits = GenerationLimits(concurrency=4)
        results = await generate_many(client, requests(20), limits)
        await third.die()
        await fleet.close()
        return urls, sorted({r.text for r in results.values()})

    urls, served_by = runner.run(swap())
    assert served_by == ["engine1", "engine2"]
    assert len(urls) == 2


def test_a_server_that_nobody_warmed_up_has_longer_for_its_first_answer(runner):
    """Before its first answer a server may compile kernels. So a server without an answer counts as lost only after
    ``first_answer_s``, and later after the hang timeout."""

    async def seconds_until_lost(client: EngineClient) -> float:
        begin = time.monotonic()
        with pytest.raises(EngineLostError, match="nothing generated"):
            async with asyncio.timeout(60):
                await client.watch(0.2)
        return time.monotonic() - begin

    async def cold_and_warm() -> tuple[float, float]:
        server = await SmallServer("x").start()
        server.silent = True
        cold = replace(server.member, first_answer_s=1.0)
        # Ranks receive the members as JSON.
        (cold,) = MEMBERS.validate_json(MEMBERS.dump_json([cold]))
        async with client_of(cold) as client:
            cold_s = await seconds_until_lost(client)
        warm = replace(cold, first_answer_s=3600.0)
        async with client_of(warm) as client:
            client.note_answer()
            warm_s = await seconds_until_lost(client)
        server.silent = False
        await server.die()
        return cold_s, warm_s

    cold_s, warm_s = runner.run(cold_and_warm())
    assert cold_s >= 1.0
    assert warm_s >= 0.2


def test_a_watch_that_begins_while_another_ends_finds_a_server_that_hangs(runner):
    async def work() -> list[Server]:
        server = SmallServer("engine0")
        fleet = Fleet([server])
        client = await fleet.open()
        await client.generate(requests(1), "first")
        server.silent = True
        ending_watch = asyncio.create_task(client.watch(0.2))
        await asyncio.sleep(0.05)
        ending_watch.cancel()
        # The task has received its cancellation, and waits for the watches of the servers to end.
        await asyncio.sleep(0)
        assert not ending_watch.done()
        with pytest.raises(EngineLostError, match="nothing generated"):
            async with asyncio.timeout(20):
                await client.watch(0.2)
        server.silent = False
        await fleet.close()
        return fleet.lost

    assert [server.name for server in runner.run(work())] == ["engine0"]


@ROUTED
def test_calls_over_an_update_are_read_after_it_and_none_begins_meanwhile(runner, routed):
    """An answer that arrives before the commit may have tokens of the version that will be committed."""
    server = SmallServer("engine0", delay_s=0.05)
    fleet = Fleet([server], SmallRouter() if routed else None)

    async def work() -> list[int]:
        client = await fleet.open(version=1)
        server.version = 2
        early = asyncio.create_task(client.generate(requests(1), "early"))
        await asyncio.sleep(0.01)
        await client.hold()
        late = asyncio.create_task(client.generate(requests(2)[1:], "late"))
        await asyncio.sleep(0.2)
        assert server.answered == Counter([0])
        assert not early.done()
        await client.serve([server.member], 2)
        answers = [await early, await late]
        await fleet.close()
        return [int(t.column("weight_version")[0]) for (t,) in answers]

    assert runner.run(work()) == [2, 2]
    assert not fleet.lost


def test_calls_over_a_failed_update_are_made_again(runner):
    server = SmallServer("engine0", delay_s=0.05)
    fleet = Fleet([server])

    async def work() -> Results:
        client = await fleet.open(version=1)
        generation = asyncio.create_task(generate_many(client, requests(1), GenerationLimits(1)))
        await asyncio.sleep(0.01)
        await client.hold()
        await client.break_off()
        await client.serve([server.member], 1)
        results = await generation
        await fleet.close()
        return results

    assert list(runner.run(work())) == [0]


@ROUTED
def test_an_answer_with_tokens_of_a_failed_update_is_asked_for_again(runner, routed):
    """A response continues while the canary scores the servers, so some of its tokens are of the unverified version.
    Then its server fails, and the other servers commit the version."""
    sound, failing = SmallServer("engine0"), SmallServer("engine1", delay_s=0.3)
    failing.versions = {1: "unverified-2"}
    fleet = Fleet([sound, failing], SmallRouter() if routed else None)

    async def work() -> tuple[Results, Counter[int], dict[str, str]]:
        client = await fleet.open(version=1)
        await client.serve([failing.member], 1)
        generation = asyncio.create_task(generate_many(client, requests(2), GenerationLimits(2)))
        await asyncio.sleep(0.1)
        await client.hold()
        while failing.answered.total() < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await client.break_off()
        sound.version = 2
        await client.serve([sound.member], 2)
        results = await generation
        losses = client.take_losses()
        await fleet.close()
        return results, sound.answered, losses

    results, repeated, losses = runner.run(work())
    assert [(t.text, t.column("weight_version").tolist()) for t in results.values()] == [
        ("engine1", [1]),
        ("engine0", [2]),
    ]
    assert repeated == Counter([1])
    assert not losses
    assert not fleet.lost


def test_a_paused_server_is_not_taken_for_a_hung_one(runner):
    server = SmallServer("engine0", delay_s=0.01)
    fleet = Fleet([server])

    async def pause(client: CountingClient) -> None:
        await wait_for_answers(client)
        await client.hold()
        server.silent = True
        await asyncio.sleep(3.0)
        server.silent = False
        await client.serve([server.member], 1)

    results = ask(runner, fleet, 40, pause, hang_timeout_s=1.5)
    assert list(results) == list(range(40))
    assert not fleet.lost


# --- an update that aborts what is in flight


@ROUTED
def test_a_hold_that_aborts_returns_when_every_call_is_answered(runner, routed):
    """After the commit each response continues from its tokens so far, with the adapters of the new version."""
    fleet = Fleet(two_servers(), SmallRouter() if routed else None)
    three_token_requests = [GenerationRequest(i, (i,), SamplingParams(3)) for i in range(6)]
    continuation = Continuation(lambda ids, special=True: "")

    async def work() -> Results:
        client = await fleet.open(1)
        client._names_adapters = True
        for server in fleet.servers:
            server.silent = True
        limits = GenerationLimits(concurrency=6)
        generation = asyncio.create_task(
            generate_many(client, three_token_requests, limits, continuation=continuation)
        )
        await asyncio.sleep(0.2)
        await client.hold(abort=True)
        answered = sum((s.answered for s in fleet.servers), Counter())
        assert answered == Counter(range(6))
        assert not generation.done()
        for server in fleet.servers:
            server.silent, server.version = False, 2
        await client.serve([s.member for s in fleet.servers], 2)
        results = await generation
        await fleet.close()
        return results

    results = runner.run(work())
    # Version 1 sampled two tokens. The last of them is dropped, and version 2 samples it again.
    for key, whole in results.items():
        assert whole.response_ids.tolist() == [key, key]
        assert whole.columns["weight_version"].tolist() == [1, 2]
    assert continuation.redrawn == 6
    assert set.union(*(s.adapters for s in fleet.servers)) == {"policy-1", "policy-2"}


def test_a_hold_that_aborts_ends_with_the_server_that_does_not_answer(runner, monkeypatch):
    monkeypatch.setattr("megatron_dppo.fleet.client._PROBE_SECONDS", 0.2)
    fleet = Fleet(two_servers())

    async def hang(client: CountingClient) -> None:
        await silence(fleet.servers[0])(client)
        fleet.servers[0].deaf = {"/abort_request"}
        await asyncio.sleep(0.1)
        await client.hold(abort=True)
        await client.serve([fleet.servers[1].member], 1)

    assert list(ask(runner, fleet, 40, hang, hang_timeout_s=1)) == list(range(40))
    assert "engine0" in [s.name for s in fleet.lost]
