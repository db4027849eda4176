"""generate_many against a client that misbehaves on purpose: order, retries, deadlines, losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NoReturn

import pytest

from megatron_dppo.config.schema import EngineConfig, EnvironmentConfig, RolloutConfig
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.errors import (
    AbortedError,
    EngineLostError,
    EngineRequestError,
    GenerationInterruptedError,
    ServerLostError,
    StopRequestedError,
)
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams
from megatron_dppo.fleet import generation
from megatron_dppo.fleet.generation import (
    Generation,
    GenerationEnd,
    GenerationJob,
    GenerationLimits,
    Slots,
    generate_many,
)
from megatron_dppo.metrics.progress import Tracker
from megatron_dppo.system.async_runner import AsyncRunner
from tests.messages import mentioning
from tests.patience import own_patience


class ScriptedClient:
    """Answers like a GenerationClient; ``behave(key, attempt)`` may sleep or raise first."""

    def __init__(self, behave, lost_after_s: float = 60) -> None:
        self.behave = behave
        self.lost_after_s = lost_after_s
        self.rids: list[str] = []
        self.aborted: list[str] = []
        self.attempts: dict = {}
        self.running = self.most_running = 0

    async def generate(self, requests: Sequence[GenerationRequest], rid: str):
        self.rids.append(rid)
        self.running += len(requests)
        self.most_running = max(self.most_running, self.running)
        try:
            for request in requests:
                attempt = self.attempts[request.key] = self.attempts.get(request.key, -1) + 1
                await self.behave(request.key, attempt)
        finally:
            self.running -= len(requests)
        return [self.result(r) for r in requests]

    def result(self, request: GenerationRequest) -> Trajectory:
        return Trajectory.of_response(request.prompt_ids, [int(str(request.key))])

    async def abort(self, rid: str, count: int) -> None:
        self.aborted += [rid] * count

    async def watch(self, hang_timeout_s: float) -> NoReturn:
        await asyncio.sleep(self.lost_after_s)
        raise EngineLostError(f"silent for {hang_timeout_s} s")


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(i, (1,), SamplingParams(1)) for i in range(count)]


def run(client: ScriptedClient, count: int, limits: GenerationLimits, **kwargs):
    with AsyncRunner() as runner:
        return runner.run(generate_many(client, requests(count), limits, **kwargs))


async def answer_at_once(key: int, attempt: int) -> None:
    await asyncio.sleep(0)


def test_the_time_limit_fits_the_longest_response():
    def limit(**values: Any) -> float:
        rollout = RolloutConfig(prompts_per_step=1, group_size=2, **values)
        return GenerationLimits.of(rollout, EngineConfig(), EnvironmentConfig()).request_timeout_s

    assert limit(max_response_tokens=6000) == 600.0
    assert limit(max_response_tokens=16_384) == 1638.4  # at 10 tokens/s
    assert limit(max_response_tokens=16_384, request_timeout_s=5.0) == 5.0


def test_results_keep_the_order_of_the_requests():
    async def later_first(key: int, attempt: int) -> None:
        await asyncio.sleep(0.01 * (8 - key))

    client = ScriptedClient(later_first)
    results = run(client, 8, GenerationLimits(concurrency=3))
    assert list(results) == list(range(8))
    assert [t.response_ids.tolist() for t in results.values()] == [[i] for i in range(8)]
    assert client.most_running == 3


def test_each_response_is_told_once_as_it_comes():
    """An attempt that was aborted reports no response, so its request reports only the response of the next attempt."""

    async def abort_first_then_last_first(key: int, attempt: int) -> None:
        if key == 2 and attempt == 0:
            raise AbortedError("paused")
        await asyncio.sleep(0.01 * (6 - key))

    arrivals: list[tuple[int, list[int]]] = []
    run(
        ScriptedClient(abort_first_then_last_first),
        6,
        GenerationLimits(concurrency=6),
        on_response=lambda key, t: arrivals.append((key, t.response_ids.tolist())),
    )
    assert sorted(arrivals) == [(i, [i]) for i in range(6)]
    assert arrivals[0][0] == 5


def test_responses_can_share_a_call():
    client = ScriptedClient(answer_at_once)
    results = run(client, 7, GenerationLimits(concurrency=6, responses_per_call=3))
    assert list(results) == list(range(7))
    assert client.most_running <= 6
    assert len(set(client.rids)) == 3


def test_an_aborted_request_is_asked_again_under_a_new_id_and_counted_once():
    async def abort_first(key: int, attempt: int) -> None:
        if key == 1 and attempt == 0:
            raise AbortedError("paused")

    client = ScriptedClient(abort_first)
    results = run(client, 3, GenerationLimits(concurrency=3))
    assert list(results) == [0, 1, 2]
    assert client.attempts == {0: 0, 1: 1, 2: 0}
    assert len(set(client.rids)) == 4
    assert not any(a != b and b.startswith(a) for a in client.rids for b in client.rids)


def test_a_late_request_is_aborted_before_it_is_asked_again(caplog):
    client = ScriptedClient(hang_first)
    results = run(client, 1, GenerationLimits(concurrency=1, request_timeout_s=0.05))
    assert list(results) == [0]
    assert client.aborted == client.rids[:1]
    (warned,) = [r.getMessage() for r in caplog.records if r.name.endswith("fleet.generation")]
    assert "0.05 s" in warned


def test_a_lost_server_of_several_costs_no_attempt():
    async def lose_often(key: int, attempt: int) -> None:
        if attempt < 6:
            raise ServerLostError("one of many")

    client = ScriptedClient(lose_often)
    assert list(run(client, 2, GenerationLimits(concurrency=2, max_attempts=1))) == [0, 1]
    assert client.attempts == {0: 6, 1: 6}
    assert len(set(client.rids)) == 14


async def hang(key: int, attempt: int) -> None:
    await asyncio.sleep(60)


async def hang_first(key: Any, attempt: int) -> None:
    await asyncio.sleep(60 if attempt == 0 and key in (0, (0, 0)) else 0)


def test_attempts_and_losses_are_bounded():
    async def lose_always(key: int, attempt: int) -> None:
        raise ServerLostError("a router that flaps")

    with pytest.raises(GenerationInterruptedError, match=r"\b20 .*flaps"):
        run(ScriptedClient(lose_always), 1, GenerationLimits(concurrency=1))
    client = ScriptedClient(hang)
    limits = GenerationLimits(concurrency=1, request_timeout_s=0.02, max_attempts=2)
    with pytest.raises(GenerationInterruptedError, match=r"\b2 .*0.02 s"):
        run(client, 1, limits)
    assert client.attempts == {0: 1}


def test_a_lost_engine_interrupts_at_once_and_keeps_what_is_finished():
    async def die_at_three(key: int, attempt: int) -> None:
        if key == 3:
            await asyncio.sleep(0.05)
            raise EngineLostError("connection reset")
        await asyncio.sleep(60 if key > 3 else 0)

    client, patience = ScriptedClient(die_at_three), own_patience(30)
    with pytest.raises(GenerationInterruptedError, match=mentioning(3)) as caught:
        run(client, 8, GenerationLimits(concurrency=8))
    assert list(caught.value.completed) == [0, 1, 2]
    assert not patience.is_exhausted()
    assert client.running == 0
    assert set(client.aborted) >= {rid for rid in client.rids if rid.endswith("-00000007-0000")}


def test_a_silent_engine_is_lost():
    limits = GenerationLimits(concurrency=1, hang_timeout_s=0.2)
    with pytest.raises(GenerationInterruptedError, match=r"0.2"):
        run(ScriptedClient(hang, lost_after_s=0.1), 1, limits)


def test_stop_aborts_what_is_in_flight():
    async def answer_one(key: int, attempt: int) -> None:
        await asyncio.sleep(60 if key else 0)

    client = ScriptedClient(answer_one)
    with pytest.raises(StopRequestedError, match="1 of 4"):
        run(client, 4, GenerationLimits(concurrency=4), stop=lambda: True)
    assert len(client.aborted) == 3
    assert client.running == 0


def test_a_refused_request_is_not_retried():
    async def refuse(key: int, attempt: int) -> None:
        raise EngineRequestError(400, "too long")

    client = ScriptedClient(refuse)
    with pytest.raises(EngineRequestError) as caught:
        run(client, 1, GenerationLimits(concurrency=1))
    assert caught.value.status == 400
    assert client.attempts == {0: 0}


def test_nothing_to_ask_is_no_error():
    assert run(ScriptedClient(answer_at_once), 0, GenerationLimits(concurrency=4)) == {}


def test_a_free_slot_goes_to_the_generation_that_is_needed_first():
    """Of the calls that wait for the only slot, the call with the lowest order gets it first, although it came last."""
    served_orders: list[int] = []

    async def take(slots: Slots, order: int) -> None:
        async with slots.taken(order):
            served_orders.append(order)
            await asyncio.sleep(0)

    async def work() -> None:
        slots = Slots(1)
        async with slots.taken(0):
            waiting = [asyncio.create_task(take(slots, order)) for order in (3, 2, 3, 1)]
            await asyncio.sleep(0)
            # A call that is cancelled while it waits leaves the queue.
            waiting[1].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*waiting, return_exceptions=True)
        async with slots.taken(0):
            served_orders.append(0)

    asyncio.run(work())
    assert served_orders == [1, 3, 3, 0]


def test_slots_are_busy_while_one_is_taken_and_servers_do_not_stand_still(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(generation.time, "monotonic", lambda: now[0])

    async def work() -> float:
        slots = Slots(2)
        now[0] += 1
        async with slots.taken(0):
            now[0] += 2
            async with slots.taken(0):
                now[0] += 4
            slots.hold(True)
            now[0] += 8
            slots.hold(False)
            now[0] += 16
        now[0] += 32
        return slots.busy_s

    assert asyncio.run(work()) == 2 + 4 + 16


class HandClock(asyncio.SelectorEventLoop):
    """An event loop whose clock is advanced by the test."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    async def pass_time(self, seconds: float) -> None:
        """Let tasks that were created start, then advance the clock, and run the timers that are due."""
        for step_s in (0, seconds):
            self.now_s += step_s
            for _ in range(5):
                await asyncio.sleep(0)


def test_time_limits_stand_still_with_the_servers():
    """Three calls have limits of 10 s. ``begun`` is in flight when the servers pause. ``held`` begins during the pause,
    so all of its 10 s lie after the pause. The limit of ``late`` runs out just before the pause."""
    loop = HandClock()
    timed_out_calls: list[str] = []

    async def call(slots: Slots, name: str) -> None:
        try:
            async with slots.limited(10):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            timed_out_calls.append(name)

    async def work() -> None:
        slots = Slots(1)
        late = asyncio.create_task(call(slots, "late"))
        await loop.pass_time(4)
        begun = asyncio.create_task(call(slots, "begun"))
        await loop.pass_time(5)
        loop.now_s += 1.5
        # The timer of ``late`` has run, but its task has not yet received the TimeoutError.
        for _ in range(2):
            await asyncio.sleep(0)
        slots.hold(True)
        slots.hold(True)  # after a failed update the next one holds again
        held = asyncio.create_task(call(slots, "held"))
        await loop.pass_time(1000)
        assert timed_out_calls == ["late"]
        slots.hold(False)
        await loop.pass_time(3.4)
        assert timed_out_calls == ["late"]
        slots.hold(False)  # A second call must not give the limits their time again.
        await loop.pass_time(0.2)
        assert timed_out_calls == ["late", "begun"]
        await loop.pass_time(6.3)
        assert timed_out_calls == ["late", "begun"]
        await loop.pass_time(0.2)
        assert timed_out_calls == ["late", "begun", "held"]
        await asyncio.gather(late, begun, held)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(work())


def test_a_call_over_a_long_update_is_not_asked_again():
    """Time of paused servers does not count, so a call may take many times its limit during a long update."""

    async def work() -> list[int]:
        slots, served = Slots(1), asyncio.Event()

        async def wait(key: int, attempt: int) -> None:
            await served.wait()

        client, limits = ScriptedClient(wait), GenerationLimits(1, request_timeout_s=0.02)
        slots.hold(True)
        results = asyncio.create_task(generate_many(client, requests(1), limits, slots=slots))
        await asyncio.sleep(0.2)
        served.set()
        assert list(await results) == [0]
        return [len(client.rids), len(client.aborted)]

    assert asyncio.run(work()) == [1, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_generation_counts_responses_that_took_too_long(size, runner):
    """Responses that take too long are sampled again, which may favour short ones. Here one call times out, once."""

    class OneToken(ScriptedClient):
        def result(self, request: GenerationRequest) -> Trajectory:
            return Trajectory.of_response(request.prompt_ids, [1])

    job = GenerationJob([Problem(0, "p", "a", (1,))], 4, SamplingParams(4))
    timed_generation = Generation(job, "generate")
    limits = GenerationLimits(4, request_timeout_s=0.5, responses_per_call=size)
    timed_generation.resume(runner, OneToken(hang_first), limits, lambda: False, Slots(4))
    assert timed_generation.wait(lambda: False) == (GenerationEnd.DONE, "")
    assert timed_generation.timed_out == size


def test_a_bar_ends_at_what_came(monkeypatch):
    """All responses of a short generation arrive before the bar is drawn for the first time."""
    tracker = Tracker("generate", 4)
    monkeypatch.setattr(generation, "progress", lambda *_: nullcontext(tracker))
    problems = [Problem(i, "p", "a", (1,)) for i in range(2)]
    short = Generation(GenerationJob(problems, 2, SamplingParams(4)), "generate")
    short.responses, short.running = 4, Future()
    short.running.set_result({})
    assert short.wait(lambda: False)[0] is GenerationEnd.DONE
    assert tracker.completed == 4
