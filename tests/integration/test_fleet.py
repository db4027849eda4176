"""Two real SGLang servers, with the real router and without it: whatever fails, every prompt is
answered exactly once.

One fleet serves every test, in this order. A server that a test kills is back for a later test.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.sampling import ProblemSampler, ReturningSampler
from megatron_dppo.data.trajectory import Problem, Trajectory
from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.protocol import GenerationRequest, SamplingParams
from megatron_dppo.fleet.client import FleetClient
from megatron_dppo.fleet.generation import GenerationJob, GenerationLimits, Results, generate_many
from megatron_dppo.fleet.http_router import OPEN_PATHS
from megatron_dppo.fleet.membership import Member, client_of
from megatron_dppo.fleet.record import Server
from megatron_dppo.fleet.router_link import HttpRouterLink
from megatron_dppo.system.async_runner import AsyncRunner
from tests.integration.kept_fleet import KeptFleet, config_of, family, kill, proceed, stop
from tests.integration.weight_server import reference_log_probs
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TOKENS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("fleet")
    model = save_tiny_model(folder / "moe", "qwen3_moe", seed=3)
    return config_of(folder / "run", model)


@pytest.fixture(scope="module")
def fleet(config) -> Iterator[KeptFleet]:
    with KeptFleet(config) as kept:
        kept.members(2)
        kept.wait_for(kept.record.router)
        yield kept


class CountingClient(FleetClient):
    """Counts the answers to each request."""

    def __init__(self, fleet: KeptFleet, *, routed: bool) -> None:
        self.link = (
            HttpRouterLink(fleet.record.reachable_router, registers=True) if routed else None
        )
        super().__init__(fleet.record.report_lost, self.link)
        self.answered: Counter[int] = Counter()

    async def generate(self, requests, rid):
        results = await super().generate(requests, rid)
        self.answered.update(request.key for request in requests)
        return results


def ask(
    runner: AsyncRunner,
    client: CountingClient,
    members: Sequence[Member],
    count: int,
    *,
    disturb: Callable[[int], None] = lambda done: None,
    version: int = 0,
    **limits: float,
) -> dict[str, str]:
    """Return the servers that were lost while ``count`` prompts were answered, each prompt exactly once.

    ``disturb`` is called after each response with the number of finished responses. ``version``: the
    checkpoint's weights have version 0.
    """
    sampling = SamplingParams(TOKENS, ignore_eos=True)
    requests = [
        GenerationRequest(i, (3 + i % 500, 3 + i // 500, 7), sampling) for i in range(count)
    ]
    given: dict[str, Any] = {
        "concurrency": 128,
        "responses_per_call": 4,
        "hang_timeout_s": 20,
    } | limits

    responses = itertools.count(1)

    def on_response(key: Hashable, trajectory: Trajectory) -> None:
        disturb(next(responses))

    async def work() -> Results:
        await client.serve(members, version)
        assert client.link is None or client.link.is_usable
        try:
            limits = GenerationLimits(**given)
            return await generate_many(client, requests, limits, on_response=on_response)
        finally:
            await client.close()

    results = runner.run(work())
    assert list(results) == list(range(count))
    assert client.answered == Counter(range(count))
    assert all(t.sampled == TOKENS for t in results.values())
    versions = [t.columns["weight_version"] for t in results.values()]
    assert set(np.concatenate(versions).tolist()) == {version}
    return client.take_losses()


def once(action: Callable[[], None], at: int) -> Callable[[int], None]:
    """Return a function for ``disturb`` that calls ``action`` once, after ``at`` responses."""
    done: list[int] = []

    def disturb(responses: int) -> None:
        if responses >= at and not done:
            done.append(responses)
            action()

    return disturb


@contextmanager
def slow_down(server: Server, share: float = 0.15) -> Iterator[None]:
    """Let ``server`` run only for ``share`` of the time."""
    end = threading.Event()

    def pulse() -> None:
        while not end.is_set():
            stop(server)
            end.wait(0.4 * (1 - share))
            proceed(server)
            end.wait(0.4 * share)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_a_router_that_is_killed_loses_nothing_and_its_successor_is_used(fleet, runner):
    members, router = fleet.members(2), fleet.server("router")
    client = CountingClient(fleet, routed=True)
    assert ask(runner, client, members, 1000, disturb=once(lambda: kill(router), 200)) == {}
    fleet.wait_until_replaced(router)
    successor = CountingClient(fleet, routed=True)
    used = []
    ask(runner, successor, members, 200, disturb=lambda done: used.append(successor.link.is_usable))
    assert all(used)


def test_a_slow_server_gets_less_to_do_and_is_not_lost(fleet, runner):
    members = fleet.members(2)
    client = CountingClient(fleet, routed=False)
    with slow_down(members[0].server):
        assert ask(runner, client, members, 600, concurrency=32) == {}


def test_a_stopped_server_that_nobody_kills_holds_nothing_up(fleet, runner, monkeypatch):
    """A server that runs elsewhere acts like this. The router doesn't tell which calls the server has, so all calls are
    repeated."""
    monkeypatch.setattr("megatron_dppo.fleet.client._REPLACED_SECONDS", 1.0)
    members = fleet.members(2)
    victim = members[0].server
    client = CountingClient(fleet, routed=True)
    client._on_lost = lambda server: None
    try:
        stopping = once(lambda: stop(victim), 200)
        lost = ask(runner, client, members, 1000, disturb=stopping, hang_timeout_s=4)
    finally:
        proceed(victim)
    assert lost.keys() == {victim.name}


def test_servers_of_one_supervisor_are_forks_of_one_process(fleet):
    parents = {psutil.Process(member.server.pid).ppid() for member in fleet.members(2)}
    assert len(parents) == 1
    assert parents != {os.getpid()}


def test_no_key_is_in_a_command_line_or_a_log(fleet, config):
    keys = fleet.record.keys(fleet.members(2)[0].server)
    visible_texts = [path.read_text() for path in (Path(config.run.directory) / "logs").iterdir()]
    for server in (*fleet.record.servers(), fleet.record.router()):
        visible_texts += [" ".join(process.cmdline()) for process in family(server)]
    assert len(visible_texts) >= 3 + 3
    assert not [text for text in visible_texts for key in (keys.api, keys.admin) if key in text]


def open_paths(port: int) -> dict[str, str]:
    """Return the paths of the router that answer without a key, with their answers."""
    found = {}
    paths = "/metrics /workers /generate /v1/completions /v1/chat/completions /flush_cache /get_loads /wasm"
    paths += (
        " /v1/tokenizers /v1/responses /v1/embeddings /tokenize /model_info /server_info /ha/status"
    )
    for path in (*OPEN_PATHS, *paths.split()):
        for method, body in (("GET", None), ("POST", b'{"text": "1", "model": "policy"}')):
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}",
                data=body, method=method, headers={"Content-Type": "application/json"},
            )  # fmt: skip
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    found[path] = answer.read().decode()
            except urllib.error.HTTPError as error:
                if error.code not in (401, 403, 404, 405):
                    found[path] = error.read().decode()
    return found


def test_what_the_router_tells_without_a_key_is_what_is_said_of_it(fleet):
    """Without a key, the router answers only OPEN_PATHS, and tells no key. docs/shared_hosts.md lists the paths."""
    router = fleet.record.router()
    port = int(router.url.rpartition(":")[2])
    found = open_paths(port)
    # The router forwards these paths to its first server, which may be gone.
    forwarded_paths = {"/get_model_info", "/get_server_info"}
    assert set(OPEN_PATHS) - forwarded_paths <= set(found) <= set(OPEN_PATHS)
    keys = fleet.record.keys(fleet.members(2)[0].server)
    assert not [
        path for path, answer in found.items() if keys.api in answer or keys.admin in answer
    ]
    text = (Path(__file__).parents[2] / "docs" / "shared_hosts.md").read_text()
    assert not [path for path in OPEN_PATHS if f"`{path}`" not in text]
    listening = [
        c.laddr for p in family(router) for c in p.net_connections("tcp") if c.status == "LISTEN"
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_a_thousand_prompts_through_the_router_with_one_of_two_servers_killed(fleet, runner):
    members = fleet.members(2)
    victim = members[1].server
    client = CountingClient(fleet, routed=True)
    lost = ask(runner, client, members, 1000, disturb=once(lambda: kill(victim), 200))
    assert lost.keys() == {victim.name}
    fleet.wait_for(lambda: fleet.server(victim.name) is None)


def update_three_times(config_json: str, exported: str) -> list[list[str]]:
    """On a rank: return the servers in each of three updates. engine0 fails in update 2; update 3 has changed
    weights."""
    from megatron_dppo.loop.engine_session import EngineSession
    from megatron_dppo.spec import RunSpec
    from megatron_dppo.trainer.trainer import Trainer

    config = TrainConfig.model_validate_json(config_json)
    trainer, failing, took_part = Trainer.read(config), [], []

    class Session(EngineSession):
        async def _open_engine(self, url):
            weights = await super()._open_engine(url)
            [name] = [m.server.name for m in self._members if m.server.url == url]
            set_version = weights.set_version

            async def refuse(label: str) -> None:
                if name in failing:
                    raise EngineAnswerError(f"planted in {name}")
                await set_version(label)

            weights.set_version = refuse  # type: ignore[method-assign]
            return weights

    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data.mul_(1.25)
    with Session(config, RunSpec.of_checked(config), trainer, stop=lambda: False) as session:
        session.connect()
        for version in (1, 2, 3):
            failing[:] = ["engine0"] if version == 2 else []
            report = session.update_weights(version)
            assert report.verified
            took_part.append([member.server.name for member in session._members])
    trainer.export_hf(Path(exported))
    return took_part


def test_a_restarted_server_joins_and_a_failing_one_is_left_out_of_one_update(
    fleet, config, runner, tmp_path
):
    exported = tmp_path / "exported"
    fleet.members(2)
    [took_part] = run_ranks(
        "tests.integration.test_fleet:update_three_times", 1, config.model_dump_json(), str(exported)
    )  # fmt: skip
    assert took_part == [["engine0", "engine1"], ["engine1"], ["engine0", "engine1"]]
    assert fleet.record.status() == {
        "version": 3,
        "servers": {"engine0": "serves", "engine1": "serves"},
    }
    members = fleet.members(2)
    assert [m.server.incarnation for m in members] == [1, 2]
    for member in members:
        tokens, log_probs = runner.run(generate_greedily(member, version=3))
        expected = reference_log_probs(exported, tokens)[-len(log_probs) :]
        assert log_probs == pytest.approx(expected, abs=1e-4)


PROMPTS, GROUP, STEPS = 8, 4, 3


def budget(problem: int, sample: int) -> int:
    """Return a response's number of tokens, from a long tail: half have 4 to 7 tokens, one in twenty 100 or more."""
    return min(int(4 * random.Random(100 * problem + sample).paretovariate(0.9)), 110)


@dataclass(frozen=True)
class BudgetJob(GenerationJob):
    """Each response has exactly its own number of tokens."""

    def _sampling(self, position: int, sample: int) -> SamplingParams:
        tokens = budget(self.problems[position].problem_id, sample)
        return replace(self.sampling, max_new_tokens=tokens, ignore_eos=True)


def train_in_each_mode(config_json: str) -> dict[str, dict[str, Any]]:
    """On a rank: return the batches of a loop of ``STEPS`` steps, two batches ahead, by ``rollout.interrupt``."""
    from megatron_dppo.config.data_schema import RewardConfig
    from megatron_dppo.loop.engine_session import EngineSession
    from megatron_dppo.loop.rollout_sources import GeneratedRollouts
    from megatron_dppo.loop.scorer import Scorer
    from megatron_dppo.metrics.phase_timer import PhaseTimer
    from megatron_dppo.spec import RunSpec
    from megatron_dppo.trainer.trainer import Trainer

    config, found = TrainConfig.model_validate_json(config_json), {}
    trainer, environment = Trainer.read(config), dict(os.environ)
    problems = [Problem(i, "p", "1", (3 + i, 7)) for i in range(64)]
    for mode in ("drain", "retract", "abort"):
        # A session removes the servers' keys from the environment.
        os.environ.update(environment)
        settings = config.rollout.model_copy(
            update={"interrupt": mode, "max_staleness": 2, "max_concurrent_requests": 4}
        )
        changed = config.model_copy(update={"rollout": settings})
        spec = RunSpec.of_checked(changed)
        session = EngineSession(changed, spec, trainer, stop=lambda: False)
        decode = (lambda ids, special=True: "") if mode == "abort" else None
        with session, Scorer(RewardConfig(name="exact_integer")) as scorer:
            session.connect()
            session.update_weights(0)
            source = GeneratedRollouts(
                settings, config.algorithm, trainer.topology, session, scorer,
                BudgetJob((), GROUP, SamplingParams(110), decode=decode), problems,
                ReturningSampler(ProblemSampler(64, seed=5)), PhaseTimer(), STEPS,
            )  # fmt: skip
            batches = []
            for step in range(1, STEPS + 1):
                batches.append(source.collect(step))
                source.wait_before_update(step)
                session.update_weights(step)
                source.run_ahead(step)
        found[mode] = {
            "lengths": [
                [t.problem_id, t.sample_index, t.sampled] for b in batches for t in b.outlines
            ],
            "figures": [b.figures for b in batches],
        }
    return found


def test_long_responses_are_trained_on_as_often_as_short_ones(fleet, config):
    """With each value of ``rollout.interrupt``, every response is there once, with all of its tokens."""
    fleet.members(2)
    [found] = run_ranks(
        "tests.integration.test_fleet:train_in_each_mode", 1, config.model_dump_json()
    )
    sampled_problems = ProblemSampler(64, seed=5).next(STEPS * PROMPTS)
    expected = [[p, s, budget(p, s)] for p in sampled_problems for s in range(GROUP)]
    lengths = sorted(tokens for *_, tokens in expected)
    assert lengths[len(lengths) // 2] * 10 < lengths[-1]  # The lengths have a long tail.
    for mode, trained in found.items():
        assert trained["lengths"] == expected, mode
        interrupted = [f.get("rollout/interrupted", 0) for f in trained["figures"]]
        assert (max(interrupted) > 0) == (mode != "drain"), mode
        for figures in trained["figures"]:
            assert figures["rollout/response_length_trained"] == figures["rollout/response_length"]


async def generate_greedily(member: Member, version: int) -> tuple[list[int], list[float]]:
    """Return the tokens of prompt and greedy response, and the log-probabilities of the response."""
    request = GenerationRequest(0, (3, 5, 7), SamplingParams(12, temperature=0, ignore_eos=True))
    async with client_of(member) as client:
        [result] = await client.generate(
            [request], f"draw-{time.monotonic_ns()}", range(version, version + 1)
        )
    return result.token_ids.tolist(), result.columns["rollout_log_probs"].tolist()


def test_a_thousand_prompts_without_router_and_a_server_killed_while_it_is_paused(fleet, runner):
    members = fleet.members(2)
    victim = members[1]

    async def pause() -> None:
        async with client_of(victim) as client:
            await client.control("/pause_generation", {"mode": "in_place"})

    def pause_and_kill() -> None:
        asyncio.run(pause())
        time.sleep(1.0)
        kill(victim.server)

    thread = threading.Thread(target=pause_and_kill)
    client = CountingClient(fleet, routed=False)
    lost = ask(runner, client, members, 1000, disturb=once(thread.start, 200), version=3)
    assert lost.keys() == {victim.server.name}
