"""The servers of a program without a trainer: responses that are generated again because they have no reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.data.trajectory import Problem
from megatron_dppo.engine.options import FIRST_WEIGHT_VERSION
from megatron_dppo.engine.protocol import SamplingParams
from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.own_fleet import GenerationError, OwnFleet
from megatron_dppo.rewards import RewardUnavailableError
from megatron_dppo.system.async_runner import AsyncRunner
from tests.unit.config_files import minimal
from tests.unit.small_fleet import SmallServer

PROBLEMS = [Problem(0, "p", "a", (7, 8)), Problem(1, "p", "a", (9,))]
JOB = GenerationJob(PROBLEMS, 1, SamplingParams(4), seeds=SamplingSeeds(1, "batch 1", (0, 1)))


class WordServer(SmallServer):
    """Answers prompts that begin with a token with ``words[token]``, one after the other. ``seeds``: their seeds."""

    def __init__(self, words: dict[int, list[str]]) -> None:
        super().__init__("engine0", FIRST_WEIGHT_VERSION)
        self.words = words
        self.seeds: dict[int, list[int]] = {token: [] for token in words}

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seeds[body["input_ids"][0]].append(body["sampling_params"]["sampling_seed"])
        return await super()._generate(request)

    def _answer(self, token: int, *, aborted: bool = False) -> dict:
        return super()._answer(token, aborted=aborted) | {"text": self.words[token].pop(0)}


def scored(
    folder: Path,
    runner: AsyncRunner,
    words: dict[int, list[str]],
    *,
    rounds: int = 2,
    refuses: bool = False,
) -> tuple[Any, WordServer]:
    """Return the scored responses to ``JOB`` of a server with these words, and the server."""
    config = TrainConfig.model_validate(minimal(folder))
    reward = RewardConfig(
        name="tests.unit.planted_rewards:unlucky", attempts=1, workers=1, max_replacements=rounds
    )
    server = WordServer(words)
    server.refuses = refuses
    runner.run(server.start())
    fleet = OwnFleet(config, [server.member])
    try:
        with Scorer(reward) as scorer:
            return fleet.scored(JOB, "batch 1", scorer, config.algorithm), server
    finally:
        fleet.close()
        runner.run(server.die())


def test_a_response_without_a_reward_is_replaced_by_one_of_another_seed(
    tmp_path: Path, runner: AsyncRunner
) -> None:
    responses, server = scored(tmp_path, runner, {7: ["bad", "bad", "ab"], 9: ["abc"]})
    assert [(t.text, t.reward) for t in responses] == [("ab", 2), ("abc", 3)]
    # An equal seed would sample the same response again.
    assert [len(set(server.seeds[token])) for token in (7, 9)] == [3, 1]


def test_a_response_is_replaced_as_often_as_the_configuration_says(
    tmp_path: Path, runner: AsyncRunner
) -> None:
    with pytest.raises(RewardUnavailableError, match=r"1 responses .*the service is away"):
        scored(tmp_path, runner, {7: ["bad", "bad"], 9: ["abc"]}, rounds=1)


def test_a_refused_request_ends_the_generation(tmp_path: Path, runner: AsyncRunner) -> None:
    with pytest.raises(GenerationError, match=r"batch 1: .*too long"):
        scored(tmp_path, runner, {7: ["a"], 9: ["abc"]}, refuses=True)
